"""`verl-sglang-sync bench`: shapes that fit, choices that cannot be, and the end of its servers."""

import time

import pytest
from typer.testing import CliRunner

from support.forks import Fork
from verl_sglang_sync.commands.bench.engine_server import engine_server
from verl_sglang_sync.commands.bench.model_shapes import largest_that_fits
from verl_sglang_sync.commands.cli import app

H200, H100, RTX_4090 = 150 << 30, 80 << 30, 24 << 30


@pytest.mark.parametrize(
    ("gpu_bytes", "model"),
    [(H200, "qwen3-30b-a3b"), (H100, "qwen3-8b"), (RTX_4090, "qwen3-0.6b")],
)
def test_trainer_and_engine_fit_one_gpu(gpu_bytes, model):
    assert largest_that_fits(gpu_bytes) == model


def test_a_gpu_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match=r"2\.1 GB: the smallest model, qwen3-0\.6b, needs"):
        largest_that_fits(2 << 30)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--model", "gpt-5"], "--model gpt-5: allowed: "),
        (["--arms", "native,fastest"], "--arms fastest: allowed: native, flattened"),
        (["--device", "tpu"], "--device tpu: allowed: "),
        (["--json", "."], "Invalid value for '--json'"),
        (["--json", "/dev/null/file", "--device", "cpu"], "File exists: '/dev/null'"),
    ],
)
def test_impossible_choices_name_the_allowed_ones(options, text):
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert text in result.output


def test_a_server_that_just_started_is_ended(tmp_path):
    """A fork is not the leader of its process group yet."""

    def start(arguments, environment, log):
        return Fork(time.sleep, 60, environment=environment, log=log)

    kinds = {"device": "cpu", "host_backup": "on", "is_moe": False}
    with engine_server(tmp_path, **kinds, log=tmp_path / "log", wait=False, start=start):
        started = time.monotonic()
    assert time.monotonic() - started < 30
