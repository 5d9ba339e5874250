"""`benchmarks/machine.py`: runs side by side on a machine's GPUs, each with a limit."""

import shlex

import pytest
from benchmarks.machine import ROOT, Run, make, read_runs

from support.deaths import has_ended, wait_until


def run_of(name, command, *, gpus=1, limit_s=20):
    return Run(name=name, gpus=gpus, limit_s=limit_s, command=command)


def test_runs_side_by_side_have_gpus_apart(tmp_path):
    """Each waits for the other, so that both are certain to run at once."""
    runs = [
        run_of(
            own,
            f"echo $CUDA_VISIBLE_DEVICES > {tmp_path}/{own}.gpus; "
            f"until [ -e {tmp_path}/{other}.gpus ]; do sleep 0.05; done",
            gpus=2,
        )
        for own, other in (("one", "other"), ("other", "one"))
    ]
    assert make(runs, 4, tmp_path, 60) == {"one": 0, "other": 0}
    assert [(tmp_path / f"{run.name}.gpus").read_text() for run in runs] == ["0,1\n", "2,3\n"]


def test_a_run_waits_until_gpus_are_free(tmp_path):
    order = f"echo {{json}} >> {tmp_path}/order"
    runs = [
        run_of("narrow", f"sleep 0.3; {order}"),
        run_of("wide", order, gpus=2),
        run_of("last", order),
    ]
    make(runs, 2, tmp_path, 60)
    made = (tmp_path / "order").read_text().split()
    assert made == [str(tmp_path / f"{run.name}.json") for run in runs]


def child_in(folder):
    """A command that starts a child in the background, and writes down the child's number."""
    return f"sleep 60 & echo $! > {folder}/child;"


def check_ended(folder):
    child = int((folder / "child").read_text())
    wait_until(lambda: has_ended(child), 20, "the child ends")


def test_a_limit_ends_a_run_with_its_children(tmp_path):
    runs = [run_of("slow", f"{child_in(tmp_path)} wait", limit_s=2), run_of("next", "exit 3")]
    assert make(runs, 1, tmp_path, 60) == {"slow": 124, "next": 3}
    check_ended(tmp_path)
    assert (tmp_path / "slow.status").read_text() == "124\n"


def test_a_repeated_call_makes_what_is_left(tmp_path):
    runs = [run_of("short", "true", limit_s=5), run_of("long", "true", limit_s=50)]
    assert make(runs, 1, tmp_path, 10) == {"short": 0}
    assert make(runs, 1, tmp_path, 60) == {"long": 0}


@pytest.mark.parametrize("file", ["benchmarks/rows_4gpus.yaml", "tests/gpu/parts.yaml"])
def test_runs_of_the_repository_are_whole(file):
    for run in read_runs(ROOT / file, "*"):
        words = shlex.split(run.command.format(python="P", json="J", folder="F"))
        paths = [word.split("::")[0] for word in words if word.endswith(".py") or "::" in word]
        assert paths and all((ROOT / path).exists() for path in paths), run.name
        assert 1 <= run.gpus <= 4 and run.limit_s < 600


def test_every_file_of_gpu_tests_has_a_part():
    parts = " ".join(run.command for run in read_runs(ROOT / "tests/gpu/parts.yaml", "*"))
    assert all(file.name in parts for file in (ROOT / "tests/gpu").glob("test_*.py"))


def test_what_a_run_leaves_ends_with_it(tmp_path):
    runs = [run_of("leaves", f"{child_in(tmp_path)} exit 3"), run_of("next", "true")]
    assert make(runs, 1, tmp_path, 60) == {"leaves": 3, "next": 0}
    check_ended(tmp_path)


def test_a_run_made_anew_begins_without_files(tmp_path):
    (tmp_path / "again").mkdir()
    (tmp_path / "again.json").write_text("of an interrupted run")
    assert make([run_of("again", "ls {json} {folder}")], 1, tmp_path, 60) == {"again": 2}


def test_runs_get_the_gpus_of_their_caller(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    make([run_of("both", "echo $CUDA_VISIBLE_DEVICES", gpus=2)], 2, tmp_path, 60)
    assert (tmp_path / "both.log").read_text() == "2,GPU-5\n"


def test_a_run_of_too_many_gpus_is_left(tmp_path):
    assert make([run_of("wide", "true", gpus=2), run_of("narrow", "true")], 1, tmp_path, 60) == {
        "narrow": 0
    }


@pytest.mark.parametrize(
    ("key", "command", "only", "error"),
    [
        ("limit", "true", "*", r"one has \['command', 'gpus', 'limit'\], not command"),
        (
            "limit_s",
            "echo {gpus}",
            "*",
            r"one has braces: 'gpus'. allowed: {python}",
        ),
        ("limit_s", "true", "two*", r"has no run 'two\*': allowed: one"),
    ],
)
def test_unusable_runs_are_refused_by_name(key, command, only, error, tmp_path):
    file = tmp_path / "runs.yaml"
    file.write_text(f"one: {{gpus: 1, {key}: 5, command: '{command}'}}\n")
    with pytest.raises(ValueError, match=error):
        read_runs(file, only)
