"""`verl-sglang-sync report`, on files that `SyncReport.publish` wrote."""

import json
import sys

import pytest
from typer.testing import CliRunner

from verl_sglang_sync.commands import cli
from verl_sglang_sync.commands.report_files.runs import read_run, trace_of
from verl_sglang_sync.report import SyncReport

SLEEP = {"release": 0.5, "resume_weights": 0.25}
FIRST = {**SLEEP, "export": 3.0, "load": 12.0, "learn": 8.0, "resume_kv_cache": 0.125}
LATER = {**SLEEP, "confirm": 0.25, "load": 0.25, "resume_kv_cache": 0.125}
DISAGGREGATED = {"export": 1.0, "pack": 0.5, "load": 2.0, "sync": 4.0}
REASON = "the plan is being made"


def publish(path, seconds, replica=0, **counts):
    """Write the line of one sync whose stages took `seconds`."""
    report = SyncReport(mode="compiled", replica=replica, payload_bytes=2 * 10**9, **counts)
    for stage in seconds:
        with report.stage(stage):
            pass
    report.seconds = seconds
    report.write(str(path))


@pytest.fixture
def compiled(tmp_path):
    """Four syncs of two replicas; the second replica is the slower one."""
    path = tmp_path / "compiled.jsonl"
    for replica, slower in ((0, 0.0), (1, 1.0)):
        eager = {"num_buckets": 3, "num_eager": 3, "eager_reason": REASON}
        publish(path, {**FIRST, "load": 12.0 + slower}, replica, **eager)
        for load in (0.5, 0.25, 0.75):
            pulled = {"num_buckets": 3, "num_pulled": 2, "num_exchanged": 1, "num_replayed": 3}
            publish(path, {**LATER, "load": load + slower}, replica, **pulled)
    return path


@pytest.fixture
def disaggregated(tmp_path):
    path = tmp_path / "disaggregated.jsonl"
    publish(path, DISAGGREGATED, None, num_buckets=4)
    return path


def run(*arguments, columns=100):
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)], env=environment)


def rows_of(output):
    rows = [line.split("  ") for line in output.splitlines() if line.startswith("  ")]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    return {row[0]: row[1:] for row in cells if row}


def test_slowest_replica_and_median_sync_are_shown(compiled):
    result = run(compiled)
    assert result.exit_code == 0
    rows = rows_of(result.stdout)
    assert rows["load"] == ["13.00", "1.5000"]
    assert rows["learn"] == ["8.0000"]
    assert rows["sleep, wake, sync"] == ["24.88", "2.6250"]
    assert rows["sync alone"] == ["24.00", "1.7500"]
    assert rows["GB/s in the sync"] == ["0.0833", "1.14"]
    assert rows["buckets"] == ["3", "3"]
    assert rows["pulled"] == ["2"]
    assert rows["exchanged"] == ["1"]
    assert rows["exported in full"] == ["3"]
    assert rows["by the load plan"] == rows["by load_weights"] == ["3"]
    assert f"{compiled}: compiled, 4 syncs of 2 replicas" in result.stdout
    assert f"load_weights in 2 of 8 lines: {REASON}" in result.stdout


@pytest.mark.parametrize("versions", ("12345", "12312"))
def test_a_missing_line_shifts_no_later_lines(tmp_path, versions):
    """Lines are of one sync by their version, also where a restarted run repeats versions."""
    path = tmp_path / "syncs.jsonl"
    for number, version in enumerate(versions):
        for replica, load in ((0, 1.0 + number), (1, 1.5 + number)):
            if (replica, number) != (0, 2):
                publish(path, {"load": load}, replica, weight_version=version)
    assert [sync.seconds["load"] for sync in read_run(path).syncs] == [1.5, 2.5, 3.5, 4.5, 5.5]


def test_files_stand_side_by_side(compiled, disaggregated):
    rows = rows_of(run(compiled, disaggregated).stdout)
    assert rows["load"] == ["13.00", "1.5000", "2.0000"]
    assert rows["other"] == ["0.5000"]  # of "sync", beside its stages
    assert rows["sync alone"] == ["24.00", "1.7500", "4.0000"]
    assert rows["exported in full"] == ["3", "4"]


@pytest.mark.parametrize("columns", (0, 20))
def test_a_narrow_terminal_cuts_no_figure(compiled, columns):
    files = [compiled] * 6
    assert rows_of(run(*files, columns=columns).stdout) == rows_of(run(*files, columns=500).stdout)


def test_both_modes_of_a_file_are_named(tmp_path):
    path = tmp_path / "both"
    for replica, mode in ((0, "compiled"), (None, "sglang_sync/compiled")):
        SyncReport(mode=mode, replica=replica, seconds={"load": 1.0}).write(str(path))
    assert "both: compiled, sglang_sync/compiled, 1 syncs of" in run(path).stdout


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(compiled, disaggregated, tmp_path, suffix):
    picture = tmp_path / f"syncs.{suffix}"
    assert run(compiled, disaggregated, "--plot", picture).exit_code == 0
    assert picture.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])


def test_the_bars_show_the_median_syncs_stages(compiled, disaggregated):
    from verl_sglang_sync.commands.report_files.plot import draw

    bars, lines = draw([read_run(compiled), read_run(disaggregated)]).axes
    assert sum(bar.get_width() for bar in bars.patches) == pytest.approx(2.625 + 4.0)
    labels = [label.get_text() for label in bars.get_yticklabels()]
    assert labels == ["compiled.jsonl\ncompiled", "disaggregated.jsonl\ncompiled"]
    assert [text.get_text().strip() for text in bars.texts] == ["2.62 s", "4 s"]
    drawn = [list(line.get_ydata()) for line in lines.get_lines()]
    assert drawn == [[24.875, 2.625, 2.375, 2.875], [4.0]]
    assert lines.get_yscale() == "log"


class TestTrace:
    def test_every_second_of_every_replica_is_in_it(self, compiled, tmp_path):
        path = tmp_path / "trace.json"
        assert run(compiled, "--trace", path).exit_code == 0
        events = json.loads(path.read_text())["traceEvents"]
        names = [event["args"]["name"] for event in events if event["ph"] == "M"]
        assert names == [str(compiled), "replica 0", "replica 1"]
        stages = [event for event in events if event["ph"] == "X"]
        total = sum(line.total_seconds for line in read_run(compiled).lines)
        assert sum(event["dur"] for event in stages) == pytest.approx(total * 1e6)

    def test_stages_begin_at_their_time_or_previous_end(self, tmp_path):
        path = tmp_path / "report.jsonl"
        report = SyncReport(mode="compiled", replica=3)
        report.seconds = {"release": 2.0, "open": 1.0, "load": 1.0, "resume_kv_cache": 1.0}
        report.started_at = {"open": 100.0, "load": 100.5, "resume_kv_cache": 110.0}
        report.write(str(path))
        events = trace_of([read_run(path)])["traceEvents"]
        begun = {event["name"]: event["ts"] / 1e6 for event in events if event["ph"] == "X"}
        assert begun == {"release": 98.0, "open": 100.0, "load": 101.0, "resume_kv_cache": 110.0}

    def test_a_whole_sync_is_drawn_around_its_stages(self, disaggregated):
        events = trace_of([read_run(disaggregated)])["traceEvents"]
        assert [event["name"] for event in events[2:]] == ["sync", "export", "pack", "load"]

    @pytest.mark.parametrize(
        ("seconds", "started_at"),
        [
            ({"load": 1.0}, {}),
            ({"load": 1.0, "sync": 1.0}, {"load": 5.0}),
            ({"load": 1.0, "sync": 1.0}, {"sync": 5.0}),
            ({"release": 1.0}, {"load": 5.0}),
        ],
    )
    def test_a_line_without_time_is_named(self, tmp_path, seconds, started_at):
        path, trace = tmp_path / "old.jsonl", tmp_path / "trace.json"
        line = SyncReport(mode="compiled", replica=0, seconds=seconds, started_at=started_at)
        line.write(str(path))
        result = run(path, "--trace", trace)
        assert result.exit_code == 2
        assert f"{path}, line 1: started_at lacks its stages" in result.stderr
        assert not trace.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no json", "line 2: not a line of a report file: JSON is malformed"),
        ('{"mode": "compiled"}', "line 2: not a line of a report file: Object missing required"),
        (b"\xff", "line 2: not a line of a report file: "),
    ],
)
def test_a_bad_line_is_named_first(tmp_path, text, expected):
    path, picture = tmp_path / "report.jsonl", tmp_path / "picture.png"
    publish(path, FIRST)
    with path.open("ab") as file:
        file.write((text if isinstance(text, bytes) else text.encode()) + b"\n")
    result = run(path, "--plot", picture)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {path}, {expected}" in result.stderr
    assert not picture.exists()


def test_a_missing_or_empty_file_is_named(compiled, tmp_path):
    result = run(compiled, tmp_path / "missing.jsonl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {tmp_path / 'missing.jsonl'}: No such file or directory\n"
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "empty.jsonl: holds no sync" in run(tmp_path / "empty.jsonl").stderr


def test_what_cannot_be_drawn_is_refused(compiled, tmp_path, monkeypatch):
    assert "allowed: .png, .svg" in run(compiled, "--plot", tmp_path / "picture.doc").stderr
    before = compiled.read_bytes()
    assert f"--trace {compiled}: allowed: .json" in run(compiled, "--trace", compiled).stderr
    assert compiled.read_bytes() == before
    unwritable = run(compiled, "--plot", tmp_path / "missing" / "picture.png")
    assert (unwritable.exit_code, unwritable.stdout) == (2, "")
    monkeypatch.delitem(sys.modules, "verl_sglang_sync.commands.report_files.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(compiled, "--plot", tmp_path / "picture.png")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--plot needs matplotlib: pip install matplotlib" in result.stderr
