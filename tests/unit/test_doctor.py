"""The doctor's judgements, from facts made up here; the real probes run in tests/contract."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console
from typer.testing import CliRunner

from sglang_loader.common import shared_memory
from sglang_loader.probe import SGLangFacts
from verl_sglang_sync import cli, doctor
from verl_sglang_sync.doctor import Check, Status, hardware, installation, presets, report
from verl_sglang_sync.doctor.check import ProbeError, run_probe

Probe = Callable[[], tuple[int, str]]

TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 1\nImportError: no such thing\n'
)
GOOD_VERL = installation.VerlFacts(
    policy="auto",
    load_error=None,
    rollout_class=installation.ROLLOUT_CLASS,
    replica_class=installation.REPLICA_CLASS,
    import_error=None,
    checks_recipes=True,
)
GOOD_SGLANG = SGLangFacts(policy="", load_errors=[], hooks={"a.B.resume": True})
CPU, GPU = (), ("H200", "H200")
ROLLOUT = "actor_rollout_ref.rollout"
NO_GPU = presets.Machine(num_gpus=0, reads_other_gpus=True)
COMPILED = (*presets.USUAL, "+weight_sync=compiled")


def statuses(checks: list[Check]) -> dict[str, Status]:
    return {check.name: check.status for check in checks}


class TestVersions:
    ALLOWED = Requirement("verl>=0.9.1,<0.10")

    @pytest.mark.parametrize(
        ("found", "status"),
        [
            ("0.9.1", Status.OK),
            ("0.9.1+cu130", Status.OK),
            ("0.9.2", Status.WARN),
            ("0.10.0", Status.FAIL),
            ("0.9.0", Status.FAIL),
            (None, Status.FAIL),
        ],
    )
    def test_compare(self, found: str | None, status: Status) -> None:
        check = installation.version_check("verl", "0.9.1", found, self.ALLOWED)
        assert check.status is status
        assert found is None or found in check.detail

    @pytest.mark.parametrize("sglang", installation.TESTED_SGLANG)
    def test_tested_sets_lie_inside_our_requirements(self, sglang: str) -> None:
        tested = installation.tested_beside(sglang) | installation.TESTED_WITH_MEGATRON
        assert tested["sglang"] == sglang
        checks = installation.version_checks(tested.get)
        versions = {check.status for check in checks if check.name.startswith("version")}
        assert versions == {Status.OK}

    @pytest.mark.parametrize("found", ["0.5.15", "0.5.16.post1", "0.5.18", "0.5.22", "0.5.24"])
    def test_an_sglang_that_is_not_tested_is_measured_by_the_default_set(self, found: str) -> None:
        tested = installation.tested_beside(found) | {"sglang": found}
        checks = {check.name: check for check in installation.version_checks(tested.get)}
        allowed = found.startswith(("0.5.15", "0.5.16"))
        assert checks["version of sglang"].status is (Status.WARN if allowed else Status.FAIL)
        assert "0.5.14" in checks["version of sglang"].detail
        assert checks["version of torch"].status is Status.OK

    def test_what_no_deps_left_out_is_named(self) -> None:
        def installed(name: str) -> str | None:
            return None if name in ("codetiming", "cachetools") else "1"

        check = installation.requirements_check(installed)
        assert check.status is Status.FAIL
        assert check.detail == (
            "not installed: cachetools (of verl-sglang-sync), codetiming (of verl)"
        )
        assert check.advice == "pip install cachetools codetiming"
        assert installation.requirements_check().status is Status.OK

    def test_megatron_is_optional_and_verl_is_not(self) -> None:
        found = statuses(installation.version_checks({"sglang": "0.5.14"}.get))
        assert found["version of mbridge"] is Status.OK
        assert found["version of verl"] is Status.FAIL


class TestEntryPoints:
    @pytest.mark.parametrize("policy", ["none", "another,plugin"])
    def test_verl_policy_that_excludes_us(self, policy: str) -> None:
        facts = msgspec.structs.replace(GOOD_VERL, policy=policy)
        check = installation.verl_checks(facts)[0]
        assert check.status is Status.FAIL
        assert f"VERL_USE_EXTERNAL_PLUGINS={policy!r}" in check.detail

    def test_verl_policy_that_names_us(self) -> None:
        facts = msgspec.structs.replace(GOOD_VERL, policy="other, verl_sglang_sync")
        assert installation.verl_checks(facts)[0].status is Status.OK

    def test_rollout_class_that_cannot_be_imported(self) -> None:
        facts = msgspec.structs.replace(GOOD_VERL, import_error=TRACEBACK, replica_class=None)
        found = statuses(installation.verl_checks(facts))
        assert found["verl rollout class"] is Status.FAIL
        assert found["verl replica class"] is Status.FAIL

    @pytest.mark.parametrize(
        ("changes", "broken"),
        [
            ({"hooks": {"a.B.resume": False}}, "SGLang hooks"),
            ({"hooks": {}}, "SGLang hooks"),
            ({"load_errors": [TRACEBACK]}, "SGLang plugin"),
            ({"policy": "another"}, "SGLang plugin"),
        ],
    )
    def test_sglang(self, changes: dict[str, object], broken: str) -> None:
        facts = msgspec.structs.replace(GOOD_SGLANG, **changes)
        assert statuses(installation.sglang_checks(facts))[broken] is Status.FAIL

    @pytest.mark.parametrize(
        ("values", "status"),
        [(["a:b"], Status.OK), ([], Status.FAIL), (["a:b", "c:d"], Status.WARN)],
    )
    def test_metadata(self, values: list[str], status: Status) -> None:
        found = [EntryPoint("verl_sglang_sync", value, "verl.plugins") for value in values]
        assert installation.entry_point_check("verl.plugins", found).status is status


class TestHardware:
    def test_gpus_are_counted(self) -> None:
        check = hardware.gpu_check(GPU)
        assert check.status is Status.OK
        assert check.detail.startswith("2 x H200; driver ")

    def test_every_pair_of_gpus_is_tried(self) -> None:
        tried = []

        def read(owner: int, reader: int) -> None:
            tried.append((owner, reader))
            if (owner, reader) in {(0, 2), (3, 1)}:
                raise RuntimeError("peer access is not supported")

        failed = hardware.failed_reads(4, read)
        assert sorted(tried) == [(owner, reader) for owner in range(4) for reader in range(4)]
        assert [(pair.owner, pair.reader) for pair in failed] == [(0, 2), (3, 1)]
        check = hardware.cuda_ipc_check(("H200",) * 4, failed)
        assert check.status is Status.WARN
        assert check.detail.splitlines() == [
            "GPU 2 cannot read GPU 0: RuntimeError: peer access is not supported",
            "GPU 1 cannot read GPU 3: RuntimeError: peer access is not supported",
        ]

    def test_another_process_reads_what_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Shared memory of the CPU stands in for a GPU's."""
        memory = torch.arange(hardware.IPC_BYTES).to(torch.uint8)
        strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            memory.share_memory_()
            handle = shared_memory.share_storage(memory.untyped_storage())
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)
        monkeypatch.setattr(torch, "arange", lambda *_, device: memory)
        monkeypatch.setattr(shared_memory, "share_storage", lambda _: handle)
        hardware.read_from_another_process(0, 1)
        monkeypatch.setattr(torch, "arange", lambda *_, device: memory // 2)
        with pytest.raises(RuntimeError, match=r"read \d+, expected \d+"):
            hardware.read_from_another_process(0, 1)
        gone = msgspec.structs.replace(handle, name="/no_such_memory")
        monkeypatch.setattr(shared_memory, "share_storage", lambda _: gone)
        with pytest.raises(RuntimeError, match=r"of the CPU cannot be mapped: .*No such file"):
            hardware.read_from_another_process(0, 1)

    def test_a_gpu_that_cannot_share_with_itself_is_a_failure(self) -> None:
        check = hardware.cuda_ipc_check(GPU, [hardware.FailedRead(1, 1, "broken")])
        assert (check.status, check.detail) == (Status.FAIL, "GPU 1 cannot read GPU 1: broken")
        assert "--ipc=host" in check.advice

    def test_cuda_ipc_where_all_is_well_or_nothing_was_tried(self) -> None:
        assert "4 pairs" in hardware.cuda_ipc_check(GPU, []).detail
        assert hardware.find_failed_reads(CPU) == []
        assert hardware.cuda_ipc_check(CPU, []).detail == "no GPU: not tried"

    @pytest.mark.parametrize(
        ("value", "status"), [(None, Status.OK), ("0", Status.OK), ("1", Status.WARN)]
    )
    def test_nccl_cumem(
        self, value: str | None, status: Status, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
        if value is not None:
            monkeypatch.setenv("NCCL_CUMEM_ENABLE", value)
        check = hardware.nccl_check(CPU)
        assert check.status is status
        assert "NCCL_CUMEM_ENABLE" in check.detail

    @pytest.mark.parametrize(
        ("files", "locked", "infiniband", "wanted"),
        [
            (65536, 8 << 20, False, ""),
            (1024, -1, True, "8192 open files"),
            (-1, 8 << 20, True, "unlimited locked memory"),
        ],
    )
    def test_ulimits(
        self,
        files: int,
        locked: int,
        infiniband: bool,
        wanted: str,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: locked}
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], -1))
        monkeypatch.setattr(
            hardware, "INFINIBAND", tmp_path if infiniband else tmp_path / "missing"
        )
        check = hardware.limits_check()
        assert check.status is (Status.WARN if wanted else Status.OK)
        assert wanted in check.advice

    @pytest.mark.parametrize(
        ("freed", "usable", "status"),
        [(256 << 20, True, Status.OK), (0, True, Status.FAIL), (256 << 20, False, Status.FAIL)],
    )
    def test_memory_saver(
        self, freed: int, usable: bool, status: Status, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hardware, "run_probe", lambda _: (freed, usable))
        monkeypatch.setattr(
            "torch_memory_saver.configure_subprocess", lambda: pytest.MonkeyPatch.context()
        )
        assert hardware.memory_saver_check(GPU).status is status

    def test_probe_that_dies_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def die(_: object) -> None:
            raise ProbeError("exit status 1\nRuntimeError: CUDA error: invalid device context")

        monkeypatch.setattr(hardware, "run_probe", die)
        check = hardware.cuda_ipc_check(GPU, hardware.find_failed_reads(GPU))
        assert check.status is Status.FAIL
        assert check.detail.splitlines() == [
            f"GPU {gpu} cannot read GPU {gpu}: RuntimeError: CUDA error: invalid device context"
            for gpu in (0, 1)
        ]

    def test_small_shared_memory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(hardware, "SHM_WANTED_BYTES", 1 << 60)
        assert hardware.shared_memory_check().status is Status.WARN
        monkeypatch.setattr(hardware, "SHM", tmp_path / "missing")
        assert hardware.shared_memory_check().status is Status.WARN


class TestProbe:
    @pytest.fixture
    def probe(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Probe]:
        """Makes a probe of a function's body, in a module that other processes can import."""
        name = f"made_up_{tmp_path.name}"
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

        def make(body: str) -> Probe:
            (tmp_path / f"{name}.py").write_text(f"def look() -> tuple[int, str]:\n    {body}\n")
            probe: Probe = importlib.import_module(name).look
            return probe

        return make

    def test_it_runs_elsewhere_with_the_environment(self, probe: Callable[[str], Probe]) -> None:
        pid, value = run_probe(
            probe("import os; return os.getpid(), os.environ['MADE_UP']"), {"MADE_UP": "x"}
        )
        assert (pid != os.getpid(), value) == (True, "x")

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("raise ImportError('broken on purpose')", "ImportError: broken on purpose"),
            ("import os; os._exit(0)", "exit status 0"),
            ("return 'one', 1", "Expected `int`"),
            ("return object()", "TypeError: Encoding objects of type object is unsupported"),
        ],
    )
    def test_anything_else_is_an_error(
        self, probe: Callable[[str], Probe], body: str, message: str
    ) -> None:
        with pytest.raises(ProbeError, match=message):
            run_probe(probe(body))

    def test_hanging_probe_is_ended(self, probe: Callable[[str], Probe]) -> None:
        with pytest.raises(ProbeError, match="no answer within"):
            run_probe(probe("import time; time.sleep(60)"), timeout_s=1)


class TestReport:
    CHECKS = (
        Check("a", Status.OK, "fine"),
        Check("b", Status.WARN, "hm [x]", "do this"),
        Check("c", Status.FAIL, "broken"),
    )

    def test_table_shows_everything(self) -> None:
        console = Console(record=True, width=100, file=sys.stderr)
        console.print(report.as_table(self.CHECKS))
        text = console.export_text()
        for expected in ("fine", "hm [x]", "do this", "broken", "fail"):
            assert expected in text
        assert "1 ok" in report.summary(self.CHECKS)

    def test_a_check_that_breaks_is_a_failed_check(self) -> None:
        def look() -> list[Check]:
            raise KeyError("lost")

        (check,) = report.guarded("thing", look)
        assert check.status is Status.FAIL
        assert "KeyError: 'lost'" in check.detail

    @pytest.mark.parametrize(("num_checks", "status"), [(2, 0), (3, 1)])
    def test_command(self, num_checks: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "diagnose", lambda _: list(self.CHECKS[:num_checks]))
        result = CliRunner().invoke(cli.app, ["doctor", "--json"])
        assert result.exit_code == status
        printed = json.loads(result.stdout)
        assert [check["name"] for check in printed["checks"]] == ["a", "b", "c"][:num_checks]
        assert CliRunner().invoke(cli.app, ["doctor"]).exit_code == status

    def test_command_takes_the_overrides_of_a_recipe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def diagnose(overrides: list[str]) -> list[Check]:
            return list(presets.recipe_checks(overrides, NO_GPU))

        monkeypatch.setattr(doctor, "diagnose", diagnose)
        command = ["doctor", "--json", "--", *COMPILED]
        good = CliRunner().invoke(cli.app, command)
        assert good.exit_code == 0
        assert json.loads(good.stdout)["checks"][-1]["name"] == "recipe: what it does"
        bad = CliRunner().invoke(cli.app, [*command, f"{ROLLOUT}.name=vllm"])
        assert bad.exit_code == 1
        assert "name='vllm'" in bad.stdout
