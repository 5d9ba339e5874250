"""No request for memory stages ends a real engine, and what it refuses it explains."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_assets import make_assets

from sglang_loader.common.engine_settings import STALE_REQUESTS_VARIABLE
from support.engine_steps import broken_sync, sync_weights
from support.http_requests import (
    answer_to,
    generate,
    get,
    post,
    release,
    resume,
    running_generation,
)
from support.sglang_server import Server, sglang_server
from support.trainer import run_trainer

pytestmark = pytest.mark.e2e

LONG = 400
GATES = {1: "wait 3", 2: "wait 300"}
"""By TP size: requests that come while the engine sleeps are refused soon, or wait."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="tp1"), pytest.param(2, id="tp2", marks=pytest.mark.slow)],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path, int]]:
    """A real server of a tiny model, its model folder and its TP size."""
    folder = tmp_path_factory.mktemp("stages")
    make_assets(folder)
    with sglang_server(
        folder / "model",
        folder,
        tp=request.param,
        host_backup="auto",
        variables={STALE_REQUESTS_VARIABLE: GATES[request.param]},
    ) as server:
        yield server, folder / "model", request.param
        assert server.process.poll() is None, "the engine died"


def test_repeated_and_superfluous_stages_are_no_ops(served: tuple[Server, Path, int]) -> None:
    url = served[0].url
    before = generate(url)
    for tags in (("kv_cache",), ("weights", "cuda_graph"), ()):
        assert resume(url, *tags)[0] == 200, "resident"
    status, text = release(url, "kv_cache", "weights")
    assert status == 200
    costs = json.loads(text)["stages"]
    assert list(costs) == ["kv_cache", "weights"]
    for cost in costs.values():
        assert len(cost["seconds"]) == served[2]
        assert cost["gpu_bytes"] == cost["host_bytes"] == [0] * served[2], "no memory saver"
    for tags in (("weights",), ("kv_cache", "weights"), ()):
        assert release(url, *tags)[0] == 200
    for tags in (("weights",), ("weights",), ("kv_cache", "weights"), ()):
        assert resume(url, *tags)[0] == 200
    assert generate(url) == before


@pytest.mark.parametrize("step", [release, resume])
def test_an_unknown_tag_is_refused(served: tuple[Server, Path, int], step: object) -> None:
    url = served[0].url
    before = generate(url)
    status, text = step(url, "weights", "gradients")  # type: ignore[operator]
    assert status == 400
    assert "TP rank 0: unknown memory tags ['gradients']; allowed: " in text
    assert generate(url) == before


def test_a_release_while_requests_run_is_refused(served: tuple[Server, Path, int]) -> None:
    """Paused, so that they do not end while the release waits for them."""
    url = served[0].url
    before = generate(url)
    with running_generation(url, LONG):
        assert post(url, "pause_generation", {"mode": "in_place"})[0] == 200
        status, text = release(url, "kv_cache", "weights")
        assert post(url, "continue_generation", {})[0] == 200
    assert status == 400
    assert "refused: requests are running" in text
    assert release(url)[0] == 200
    assert resume(url)[0] == 200
    assert generate(url) == before


def test_after_a_failed_sync_the_cache_stays_asleep(served: tuple[Server, Path, int]) -> None:
    server, model, tp = served
    url = server.url
    before = generate(url)
    assert release(url, "kv_cache", "weights")[0] == 200
    assert resume(url, "weights")[0] == 200
    [broken, *_] = run_trainer(broken_sync, model.parent, str(model), urls=[url], tp=tp)
    assert "weight sync failed" in broken.result
    status, text = resume(url, "kv_cache")
    assert status == 400
    assert "the last sync was not complete; sync the weights first" in text
    [outcome, *_] = run_trainer(sync_weights, model.parent, str(model), urls=[url], tp=tp)
    assert outcome.error is None
    assert resume(url, "kv_cache")[0] == 200
    assert generate(url) == before


def test_a_session_while_requests_are_paused_is_refused_before_its_first_byte(
    served: tuple[Server, Path, int],
) -> None:
    """Their prefixes would be those of the old weights."""
    server, model, tp = served
    url = server.url
    before = generate(url)
    with running_generation(url, LONG):
        assert post(url, "pause_generation", {"mode": "in_place"})[0] == 200
        sync = (sync_weights, model.parent, str(model), "compiled")
        outcomes = run_trainer(*sync, urls=[url], tp=tp)
        assert post(url, "continue_generation", {})[0] == 200
    for outcome in outcomes:
        assert "requests are running; the weights are as they were" in str(outcome.error)
    assert generate(url) == before, "it serves the weights that it had"
    assert [outcome.error for outcome in run_trainer(*sync, urls=[url], tp=tp)] == [None] * tp
    assert generate(url) == before


def test_a_request_that_comes_in_the_gap_waits_for_a_good_sync(
    served: tuple[Server, Path, int],
) -> None:
    """Held on all ranks in step, without blocking the sync that it waits for."""
    server, model, tp = served
    if tp == 1:
        pytest.skip("this server does not let requests wait for that long")
    url = server.url
    before = generate(url)
    assert release(url, "kv_cache", "weights")[0] == 200
    with answer_to(url, "held") as held, answer_to(url, "gone") as gone:
        time.sleep(1)
        assert get(url, "health_generate")[0] == 200, "it lives, and does not compute"
        assert post(url, "abort_request", {"rid": "gone"})[0] == 200
        assert json.loads(gone.result(30)[1])["meta_info"]["finish_reason"]["type"] == "abort"
        assert resume(url, "weights")[0] == 200
        [broken, *_] = run_trainer(broken_sync, model.parent, str(model), urls=[url], tp=tp)
        assert "weight sync failed" in broken.result
        [outcome, *_] = run_trainer(sync_weights, model.parent, str(model), urls=[url], tp=tp)
        assert outcome.error is None
        assert not held.done(), "the cache still sleeps"
        assert resume(url, "kv_cache")[0] == 200
        status, text = held.result(60)
    assert status == 200, text
    tokens = json.loads(text)["meta_info"]["output_token_logprobs"]
    assert [[logprob, token] for logprob, token, _ in tokens] == before
    assert generate(url) == before


def test_a_request_that_waits_too_long_is_refused_with_the_reason(
    served: tuple[Server, Path, int],
) -> None:
    server, _, tp = served
    if tp == 2:
        pytest.skip("this server lets requests wait for long")
    before = generate(server.url)
    assert release(server.url, "kv_cache")[0] == 200
    with answer_to(server.url, "late") as late:
        status, text = late.result(60)
    assert status == 503
    assert "not served for 3 s: the engine's memory is released: kv_cache" in text
    assert resume(server.url, "kv_cache")[0] == 200
    assert generate(server.url) == before
