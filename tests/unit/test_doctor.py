"""The doctor's judgements, from facts made up here; the real probes run in tests/contract."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest
from packaging.requirements import Requirement
from rich.console import Console
from typer.testing import CliRunner

from sglang_loader.probe import SGLangFacts
from verl_sglang_sync import cli, doctor
from verl_sglang_sync.config import PRESETS
from verl_sglang_sync.doctor import entry_points, hardware, presets, report, versions
from verl_sglang_sync.doctor.check import Check, Status, failed, guarded, passed, warned, worst
from verl_sglang_sync.doctor.cuda_ipc_probe import CudaIpcFacts
from verl_sglang_sync.doctor.hydra_probe import HydraFacts
from verl_sglang_sync.doctor.memory_saver_probe import MemorySaverFacts
from verl_sglang_sync.doctor.probe import ProbeError, run_probe
from verl_sglang_sync.doctor.verl_probe import VerlFacts

TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 1\nImportError: no such thing\n'
)
GOOD_VERL = VerlFacts(
    policy="auto",
    load_error=None,
    rollout_class=entry_points.ROLLOUT_CLASS,
    replica_class=entry_points.REPLICA_CLASS,
    import_error=None,
    checks_recipes=True,
    bucket_megabytes=2048,
)
GOOD_SGLANG = SGLangFacts(policy="", load_errors=[], hooks={"a.B.resume": True})
SECTION = {"mode": "flattened", "request_timeout_s": 600, "report_file": None}
CPU = hardware.Machine(gpus=(), driver=None, cuda=None, cpus=2, ram_bytes=8 << 30)
GPU = hardware.Machine(
    gpus=("H200", "H200"), driver="580.1", cuda="13.0", cpus=16, ram_bytes=1 << 40
)


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
        check = versions.compare("verl", "0.9.1", found, self.ALLOWED)
        assert check.status is status
        assert found is None or found in check.detail

    def test_tested_set_lies_inside_our_requirements(self) -> None:
        tested = {**versions.TESTED, **versions.TESTED_WITH_MEGATRON}
        checks = versions.version_checks(tested.get)
        assert {check.status for check in checks} == {Status.OK}

    def test_megatron_is_optional_and_verl_is_not(self) -> None:
        found = statuses(versions.version_checks({"sglang": "0.5.14"}.get))
        assert found["version of mbridge"] is Status.OK
        assert found["version of verl"] is Status.FAIL


class TestEntryPoints:
    def test_good_facts_pass(self) -> None:
        checks = entry_points.verl_checks(GOOD_VERL) + entry_points.sglang_checks(GOOD_SGLANG)
        assert {check.status for check in checks} == {Status.OK}

    def test_broken_verl_plugin_shows_its_traceback(self) -> None:
        facts = msgspec.structs.replace(
            GOOD_VERL, load_error=TRACEBACK, rollout_class="verl.Own", checks_recipes=False
        )
        checks = {check.name: check for check in entry_points.verl_checks(facts)}
        assert checks["verl plugin"].status is Status.FAIL
        assert checks["verl plugin"].detail == "ImportError: no such thing"
        assert checks["verl plugin"].advice == TRACEBACK
        assert "verl.Own" in checks["verl rollout class"].detail
        assert checks["recipe checks"].status is Status.FAIL

    @pytest.mark.parametrize("policy", ["none", "another,plugin"])
    def test_verl_policy_that_excludes_us(self, policy: str) -> None:
        facts = msgspec.structs.replace(GOOD_VERL, policy=policy)
        check = entry_points.verl_checks(facts)[0]
        assert check.status is Status.FAIL
        assert f"VERL_USE_EXTERNAL_PLUGINS={policy!r}" in check.detail

    def test_verl_policy_that_names_us(self) -> None:
        facts = msgspec.structs.replace(GOOD_VERL, policy="other, verl_sglang_sync")
        assert entry_points.verl_checks(facts)[0].status is Status.OK

    def test_rollout_class_that_cannot_be_imported(self) -> None:
        facts = msgspec.structs.replace(GOOD_VERL, import_error=TRACEBACK, replica_class=None)
        found = statuses(entry_points.verl_checks(facts))
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
        assert statuses(entry_points.sglang_checks(facts))[broken] is Status.FAIL

    def test_hydra(self) -> None:
        good = HydraFacts(discovered=True, sections={"flattened": SECTION}, errors={})
        bad = msgspec.structs.replace(good, errors={"bucketed": "no such option"})
        lost = msgspec.structs.replace(good, discovered=False)
        assert entry_points.hydra_checks(good)[0].status is Status.OK
        assert "no such option" in entry_points.hydra_checks(bad)[0].detail
        assert entry_points.hydra_checks(lost)[0].status is Status.FAIL

    @pytest.mark.parametrize(
        ("values", "status"),
        [(["a:b"], Status.OK), ([], Status.FAIL), (["a:b", "c:d"], Status.WARN)],
    )
    def test_metadata(self, values: list[str], status: Status) -> None:
        found = [EntryPoint("verl_sglang_sync", value, "verl.plugins") for value in values]
        assert entry_points.metadata_check("verl.plugins", found).status is status


class TestHardware:
    def test_no_gpu_is_a_warning_that_names_the_cpu_platform(self) -> None:
        check = hardware.gpu_check(CPU)
        assert check.status is Status.WARN
        assert "VERL_PLATFORM=cpu" in check.detail

    def test_gpus_are_counted(self) -> None:
        check = hardware.gpu_check(GPU)
        assert check == passed("GPU", "2 x H200; driver 580.1, CUDA 13.0")

    @pytest.mark.parametrize(
        ("received", "status"), [(6, Status.OK), (5, Status.FAIL), (None, Status.FAIL)]
    )
    def test_cuda_ipc(
        self, received: int | None, status: Status, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        facts = CudaIpcFacts(expected=6, received=received)
        monkeypatch.setattr(hardware, "run_probe", lambda *_: facts)
        assert hardware.cuda_ipc_check(GPU).status is status

    @pytest.mark.parametrize(
        ("freed", "usable", "status"),
        [(100, True, Status.OK), (0, True, Status.FAIL), (100, False, Status.FAIL)],
    )
    def test_memory_saver(
        self, freed: int, usable: bool, status: Status, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        facts = MemorySaverFacts(region_bytes=100, freed_bytes=freed, usable=usable)
        monkeypatch.setattr(hardware, "run_probe", lambda *_: facts)
        monkeypatch.setattr(
            "torch_memory_saver.configure_subprocess", lambda: pytest.MonkeyPatch.context()
        )
        assert hardware.memory_saver_check(GPU).status is status

    def test_probe_that_dies_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def die(*_: object) -> None:
            raise ProbeError("exit status 1\nRuntimeError: CUDA error: invalid device context")

        monkeypatch.setattr(hardware, "run_probe", die)
        check = hardware.cuda_ipc_check(GPU)
        assert check.status is Status.FAIL
        assert check.detail == "RuntimeError: CUDA error: invalid device context"

    def test_small_shared_memory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(hardware, "SHM_WANTED_BYTES", 1 << 60)
        assert hardware.shared_memory_check(CPU).status is Status.WARN
        monkeypatch.setattr(hardware, "SHM", tmp_path / "missing")
        assert hardware.shared_memory_check(CPU).status is Status.WARN


class TestPresets:
    SECTIONS = {  # noqa: RUF012
        preset: {**SECTION, "mode": "flattened" if preset == "disaggregated" else preset}
        for preset in PRESETS
    }

    def test_every_preset_is_described(self) -> None:
        assert set(presets.ON_GPU) == set(presets.ON_CPU) == set(PRESETS)
        for machine, status in ((GPU, Status.OK), (CPU, Status.WARN)):
            checks = presets.preset_checks(self.SECTIONS, machine, 512)
            assert [check.name for check in checks] == [f"+weight_sync={name}" for name in PRESETS]
            assert {check.status for check in checks} == {status}
            assert all("512 MiB" in check.detail for check in checks)

    def test_preset_that_does_not_compose_or_validate(self) -> None:
        sections = {"flattened": {**SECTION, "surprise": 1}}
        found = {c.name: c for c in presets.preset_checks(sections, GPU, 512)}
        assert found["+weight_sync=bucketed"].status is Status.FAIL
        assert "surprise=1: unknown key" in found["+weight_sync=flattened"].detail


class TestProbe:
    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return tmp_path / "made_up_probe.py"

    def test_facts_are_the_last_line(self, module: Path) -> None:
        module.write_text("print('noise')\nprint('{\"expected\": 1, \"received\": null}')")
        facts = run_probe("made_up_probe", CudaIpcFacts)
        assert facts == CudaIpcFacts(expected=1, received=None)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("raise ImportError('broken on purpose')", "ImportError: broken on purpose"),
            ("print('not json')", "not json"),
            ('print(\'{"expected": "one"}\')', "Expected `int`"),
            ("", "exit status 0"),
        ],
    )
    def test_anything_else_is_an_error(self, module: Path, source: str, message: str) -> None:
        module.write_text(source)
        with pytest.raises(ProbeError, match=message):
            run_probe("made_up_probe", CudaIpcFacts)

    def test_hanging_probe_is_ended(self, module: Path) -> None:
        module.write_text("import time; time.sleep(60)")
        with pytest.raises(ProbeError, match="no answer within"):
            run_probe("made_up_probe", CudaIpcFacts, timeout_s=1)


class TestReport:
    CHECKS = (passed("a", "fine"), warned("b", "hm [x]", "do this"), failed("c", "broken"))

    def test_worst_decides(self) -> None:
        assert worst(()) is Status.OK
        assert worst(self.CHECKS[:2]) is Status.WARN
        assert worst(self.CHECKS) is Status.FAIL
        assert report.exit_status(self.CHECKS[:2]) == 0
        assert report.exit_status(self.CHECKS) == 1

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

        (check,) = guarded("thing", look)
        assert check.status is Status.FAIL
        assert "KeyError: 'lost'" in check.detail

    @pytest.mark.parametrize(("num_checks", "status"), [(2, 0), (3, 1)])
    def test_command(self, num_checks: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "diagnose", lambda: list(self.CHECKS[:num_checks]))
        result = CliRunner().invoke(cli.app, ["doctor", "--json"])
        assert result.exit_code == status
        printed = json.loads(result.stdout)
        assert [check["name"] for check in printed["checks"]] == ["a", "b", "c"][:num_checks]
        assert CliRunner().invoke(cli.app, ["doctor"]).exit_code == status
