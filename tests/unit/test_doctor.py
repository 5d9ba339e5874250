"""The doctor's judgements, from facts made up here; the real probes run in tests/contract."""

import importlib
import json
import os
import subprocess
from collections import namedtuple
from functools import partial

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from sglang_loader.common import shared_memory
from sglang_loader.probe import PluginFacts
from verl_sglang_sync.commands import cli
from verl_sglang_sync.commands.doctor import check, hardware, installation, presets, report
from verl_sglang_sync.commands.doctor.check import Check, Status, run_probe

OK, WARN, FAIL = Status
TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 1\nImportError: no such thing\n'
)
FACTS = PluginFacts(load_errors=[], hooks={"a.B.resume": True})


def versions(**changed):
    """The checks of an installation that is the tested one, but for these versions."""
    named = {name.replace("_", "-"): release for name, release in changed.items()}
    installed = installation.tested_beside(named.get("sglang"), named.get("megatron-bridge"))
    with pytest.MonkeyPatch.context() as patch:
        look_up = (installed | named).get
        patch.setattr(installation, "installed_version", lambda name: look_up(name, "1"))
        return list(installation.version_checks())


def plugin(**changes):
    facts = msgspec.structs.replace(FACTS, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installation, "run_probe", lambda *_: facts)
        return list(installation.plugin_checks("verl", installation.probe_verl, {}))


def ipc(num_gpus, *failed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "run_probe", lambda *_: dict.fromkeys(failed, "broken"))
        return list(hardware.cuda_ipc_checks(num_gpus))


def nccl(**environment):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", environment)
        return list(hardware.nccl_checks(0))


JUDGED = [  # what is looked at, the check, how it is judged, and what is said
    *(
        (partial(versions, verl=found), "version of verl", status, found)
        for found, status in (
            ("0.9.1", OK),
            ("0.9.1+cu130", OK),
            ("0.9.2", WARN),
            ("0.10.0.dev0", WARN),
            ("0.11.0", FAIL),
            ("0.9.0", FAIL),
        )
    ),
    *(
        (partial(versions, sglang=found), "version of sglang", status, said)
        for found, status, said in (
            ("0.5.15", WARN, "0.5.20 (its interfaces, and syncs of engines, on CPUs)"),
            ("0.5.16.post1", WARN, "0.5.14 (all tests, and trainings on GPUs)"),
            ("0.5.18", WARN, "0.5.18, tested with 0.5.14"),
            ("0.5.20", OK, "0.5.20, as tested: its interfaces, and syncs of engines, on CPUs"),
            ("0.5.24", FAIL, "0.5.24, allowed: <0.5.24,>=0.5.14"),
            ("0.5.13", FAIL, "0.5.14"),
        )
    ),
    (partial(versions, sglang="0.5.24"), "version of torch", OK, "as tested"),
    *(
        (partial(versions, megatron_bridge=bridge, megatron_core=core), name, status, said)
        for bridge, core, name, status, said in (
            ("0.5.0", "0.18.2", "version of megatron-bridge", OK, "as tested"),
            ("0.6.2", "0.19.2", "version of megatron-core", OK, "as tested"),
            ("0.3.1", "0.18.2", "version of megatron-core", WARN, "0.16.1"),
            ("0.4.2", "0.16.1", "version of megatron-bridge", WARN, "0.3.1"),
        )
    ),
    (
        partial(versions, codetiming=None, cachetools=None),
        *("requirements", FAIL, "pip install cachetools codetiming"),
    ),
    (partial(versions, verl=None), "requirements", FAIL, "not installed: verl"),
    (versions, "requirements", OK, "are installed"),
    (plugin, "verl plugin", OK, "verl loads it"),
    (plugin, "verl hooks", OK, "all 1 are in place"),
    *(
        (partial(plugin, hooks=hooks), name, status, said)
        for hooks, name, status, said in (
            ({"a.B.resume": False, "c": True}, "verl hooks", FAIL, "not ours: a.B.resume"),
            ({"a.B.resume": False, "c": True}, "verl plugin", OK, "verl loads it"),
            ({"a.B.resume": False}, "verl plugin", FAIL, "unset VERL_USE_EXTERNAL_PLUGINS"),
            ({}, "verl plugin", FAIL, "verl does not load it"),
            ({}, "verl hooks", FAIL, "not ours: all"),
        )
    ),
    (partial(plugin, load_errors=[TRACEBACK]), "verl plugin", FAIL, TRACEBACK),
    (partial(ipc, 0), "CUDA IPC", OK, "0 GPUs visible"),
    (partial(ipc, 2), "CUDA IPC", OK, "2 GPUs visible, 4 pairs tried"),
    (partial(ipc, 2, (1, 1)), "CUDA IPC", FAIL, "--ipc=host"),
    (partial(ipc, 2, (0, 1)), "CUDA IPC", WARN, "GPU 1 cannot read GPU 0: broken"),
    (nccl, "NCCL", OK, "NCCL_CUMEM_ENABLE: not set"),
    (partial(nccl, NCCL_CUMEM_ENABLE="1"), "NCCL", WARN, "NCCL_CUMEM_ENABLE: 1"),
]


@pytest.mark.parametrize(("look", "name", "status", "said"), JUDGED)
def test_a_fact_is_judged(look, name, status, said):
    result = {check.name: check for check in look()}[name]
    assert result.status is status
    assert said in result.detail + result.advice


@pytest.mark.parametrize("release", installation.TESTED_SGLANG)
def test_tested_sets_lie_inside_our_requirements(release):
    judged = {each.status for each in versions(sglang=release) if each.name.startswith("version")}
    assert judged == {OK}


def test_a_hook_is_ours_by_its_module(monkeypatch):
    """verl's own names stand in for a plugin that replaced ours."""
    used = namedtuple("used", "")
    used.__module__ = "verl_sglang_sync_copy.rollout"
    base = importlib.import_module("verl.workers.rollout.base")
    monkeypatch.setattr(base, "get_rollout_class", lambda *_: used)
    assert installation.probe_verl().hooks["verl_sglang_sync_copy.rollout.used"] is False


def test_every_gpu_reads_every_gpu(monkeypatch):
    """Shared memory of the CPU stands in for that of two GPUs. Each reads its own first."""
    memory = torch.arange(hardware.IPC_BYTES).to(torch.uint8)
    memory.share_memory_()
    handle = shared_memory.share_storage(memory.untyped_storage())
    gone = msgspec.structs.replace(handle, name="/no_such_memory")
    handles = [handle, gone] * 2
    monkeypatch.setattr(torch, "arange", lambda *_, device: memory)
    monkeypatch.setattr(shared_memory, "share_storage", lambda _: handles.pop(0))
    failed = hardware.failed_reads(2)
    assert list(failed) == [(1, 0), (0, 1)]
    assert all("cannot be mapped" in error for error in failed.values())
    (error,) = hardware.read_errors([handle], [1])
    assert error == f"read {int(memory.sum())}, expected 1"


def test_a_reader_that_fails_names_all_its_reads(monkeypatch):
    def fail(*_):
        raise subprocess.CalledProcessError(1, "python", stderr="...\nRuntimeError: no CUDA")

    memory = torch.zeros(8, dtype=torch.uint8).share_memory_()
    monkeypatch.setattr(torch, "arange", lambda *_, device: memory)
    monkeypatch.setattr(hardware, "run_probe", fail)
    failed = hardware.failed_reads(2)
    assert set(failed) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert set(failed.values()) == {"RuntimeError: no CUDA"}


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Makes a probe of a function's body, in a module that other processes can import."""
    name = f"made_up_{tmp_path.name}"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(body):
        (tmp_path / f"{name}.py").write_text(f"def look() -> tuple[int, str]:\n    {body}\n")
        return importlib.import_module(name).look

    return make


def test_a_probe_gets_the_environment_and_may_print(probe):
    body = "import os; print('noise', end=''); return os.getpid(), os.environ['MADE_UP']"
    pid, value = run_probe(probe(body), {"MADE_UP": "x"})
    assert (pid != os.getpid(), value) == (True, "x")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ImportError('broken on purpose')", "ImportError: broken on purpose"),
        ("return lambda: 0", "AttributeError: Can't pickle local object"),
        ("import os, time; os.write(2, b'x'); time.sleep(60)", "no answer within 2 s"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import os; os._exit(0)", "IndexError"),
    ],
)
def test_a_probe_without_result_fails_its_check(probe, body, message, monkeypatch):
    if "sleep" in body:
        monkeypatch.setattr(check, "PROBE_TIMEOUT_S", 2)
    (result,) = check.guarded("thing", run_probe, probe(body), {})
    assert (result.name, result.status) == ("thing", FAIL)
    assert message in result.detail
    assert report.as_json([result])


CHECKS = (Check("a", OK, "fine"), Check("b", WARN, "hm [x]", "do this"), Check("c", FAIL, "broken"))


def test_the_text_shows_everything():
    text = report.as_text(CHECKS)
    for expected in ("fine", "hm [x]", "do this", "broken", "FAIL"):
        assert expected in text


@pytest.mark.parametrize(
    ("num_checks", "status", "exits"), [(0, OK, 0), (2, WARN, 0), (3, FAIL, 1)]
)
def test_the_worst_decides_how_the_command_ends(num_checks, status, exits, monkeypatch):
    monkeypatch.setattr(report, "diagnose", lambda _: list(CHECKS[:num_checks]))
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert result.exit_code == exits
    printed = json.loads(result.stdout)
    assert printed["status"] == status
    assert [check["name"] for check in printed["checks"]] == ["a", "b", "c"][:num_checks]
    shown = CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "20"})
    assert shown.exit_code == exits
    assert all(check.detail in shown.stdout for check in CHECKS[:num_checks]), "cut"


def test_the_command_takes_the_overrides_of_a_recipe(monkeypatch):
    look = partial(presets.recipe_checks, num_gpus=0)
    monkeypatch.setattr(report, "diagnose", lambda recipe: list(look(recipe)))
    command = ["doctor", "--json", "--", *presets.USUAL_RECIPE]
    good = CliRunner().invoke(cli.app, command)
    assert good.exit_code == 0
    assert json.loads(good.stdout)["checks"][-1]["name"] == "recipe: what it does"
    bad = CliRunner().invoke(cli.app, [*command, "actor_rollout_ref.rollout.name=vllm"])
    assert bad.exit_code == 1
    assert "name='vllm'" in bad.stdout
