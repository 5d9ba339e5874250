"""No request for memory stages ends a real engine, and what it refuses it explains."""

import asyncio
import json
import time

import pytest

from sglang_loader.common.engine_settings import (
    REQUESTS_TAG,
    STALE_REQUESTS_VARIABLE,
    TAKEN_BY_TRAINER,
)
from support.exports import doubled
from support.http_requests import (
    answer_to,
    generate,
    get,
    greedy,
    paused_generation,
    post,
    release,
    resume,
    tokens_in,
)
from support.served import served
from support.trainer import sync_error

pytestmark = pytest.mark.e2e

LONG = 150  # tokens
GATES = {1: "3", 2: "300"}
"""By TP size: requests that come while the engine sleeps are refused soon, or wait."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="tp1"), pytest.param(2, id="tp2", marks=pytest.mark.slow)],
)
def server(request, tmp_path_factory):
    options = {"host_backup": "auto", "variables": {STALE_REQUESTS_VARIABLE: GATES[request.param]}}
    with served(tmp_path_factory.mktemp("stages"), tp=request.param, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def ranks(server):
    with server.ranks() as made:
        yield made


@pytest.fixture
def engine(server):
    """The server; after every test it lives, and generates what it generated before."""
    before = generate(server.url)
    yield server
    assert server.lives, "the engine died"
    assert generate(server.url) == before


def sync_weights(rank, mode="flattened"):
    """Send the checkpoint's own weights, without any stage."""
    asyncio.run(rank.manager(mode).sync(rank.weights(), version="synced"))


def broken_sync(rank):
    """A sync that fails when some tensors are loaded; the error."""
    bad = iter(doubled(rank.weights()))
    return sync_error(rank.manager("flattened", manifest_check="off"), bad)


def test_repeated_and_superfluous_stages_are_no_ops(engine):
    url = engine.url
    for tags in (("kv_cache",), ("weights", "cuda_graph"), ()):
        assert resume(url, *tags).status == 200, "resident"
    status, text = release(url, "kv_cache", "weights")
    assert status == 200
    costs = json.loads(text)["stages"]
    assert list(costs) == ["kv_cache", "weights"]
    for cost in costs.values():
        assert len(cost["seconds"]) == engine.tp
        assert cost["gpu_bytes"] == cost["host_bytes"] == [0] * engine.tp, "no memory saver"
    for tags in (("weights",), ("kv_cache", "weights"), ()):
        assert release(url, *tags).status == 200
    for tags in (("weights",), ("weights",), ("kv_cache", "weights"), ()):
        assert resume(url, *tags).status == 200


def test_a_release_while_requests_run_is_refused(engine):
    with paused_generation(engine.url, LONG):
        status, text = release(engine.url, "kv_cache", "weights")
    assert status == 400
    assert "refused: requests are running" in text
    assert release(engine.url).status == resume(engine.url).status == 200


def test_after_a_failed_sync_the_cache_stays_asleep(engine, ranks):
    url = engine.url
    assert release(url, "kv_cache", "weights").status == 200
    assert resume(url, "weights").status == 200
    assert "weight sync failed" in ranks.run(broken_sync)[0]
    status, text = resume(url, "kv_cache")
    assert status == 400
    assert "the last sync was not complete. Sync the weights first" in text
    ranks.run(sync_weights)
    assert resume(url, "kv_cache").status == 200


def test_a_session_with_paused_requests_is_refused_early(engine, ranks):
    """Their prefixes would be those of the old weights."""
    before = generate(engine.url)
    with paused_generation(engine.url, LONG):
        outcomes = ranks.attempt(sync_weights, "compiled")
    for outcome in outcomes:
        assert "requests are running. The weights are as they were" in str(outcome.error)
    assert generate(engine.url) == before, "it serves the weights that it had"
    ranks.run(sync_weights, "compiled")


def test_a_request_in_the_gap_waits_for_sync(engine, ranks):
    """Held on all ranks in step, without blocking the sync that it waits for."""
    if engine.tp == 1:
        pytest.skip("this server does not let requests wait for that long")
    url = engine.url
    before = generate(url)
    assert release(url, "kv_cache", "weights").status == 200
    with answer_to(url, "held") as held, answer_to(url, "gone") as gone:
        time.sleep(1)
        assert get(url, "health_generate").status == 200, "it lives, and does not compute"
        assert post(url, "abort_request", {"rid": "gone"}).status == 200
        finish = json.loads(gone.result(30).text)["meta_info"]["finish_reason"]
        assert finish["type"] == "abort"
        assert resume(url, "weights").status == 200
        assert "weight sync failed" in ranks.run(broken_sync)[0]
        ranks.run(sync_weights)
        assert not held.done(), "the cache still sleeps"
        assert resume(url, "kv_cache").status == 200
        status, text = held.result(60)
    assert status == 200, text
    assert tokens_in(text) == before


def test_an_overdue_request_is_refused_with_the_reason(engine):
    if engine.tp == 2:
        pytest.skip("this server lets requests wait for long")
    assert release(engine.url, "kv_cache").status == 200
    with answer_to(engine.url, "late") as late:
        status, text = late.result(60)
    assert status == 503
    assert "not served for 3 s: the engine's memory is released: kv_cache" in text
    assert resume(engine.url, "kv_cache").status == 200


def test_an_engine_taken_by_trainer_refuses_at_once(engine):
    """The request that waits, and those that come before requests are resumed."""
    url = engine.url
    assert release(url, "kv_cache").status == 200
    with answer_to(url, "early") as early:
        time.sleep(0.5)
        assert not early.done(), "it waits"
        assert release(url, REQUESTS_TAG).status == 200
        refused = [early.result(), post(url, "generate", greedy(2))]
    assert resume(url, "kv_cache").status == 200
    refused.append(post(url, "generate", greedy(2)))
    for answer in refused:
        assert answer.status == 503
        assert f"not served: {TAKEN_BY_TRAINER}" in answer.text, "not after a wait"
    assert get(url, "health").status == 200
    assert resume(url, REQUESTS_TAG).status == 200
