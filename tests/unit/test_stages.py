"""The orders of sleep and wake-up: what a setting means, and what is refused."""

import re

import pytest

from verl_sglang_sync.stages import StageOrder

SECTION = "weight_sync"
SLEEP = ["kv_cache", "weights"]
WAKE = ["weights", "sync", "kv_cache"]


@pytest.mark.parametrize(
    ("wake", "before", "after"),
    (
        (["weights", "sync", "cuda_graph", "kv_cache"], ("weights",), ("cuda_graph", "kv_cache")),
        (["weights", "sync", "kv_cache", "cuda_graph"], ("weights",), ("kv_cache", "cuda_graph")),
        (["cuda_graph", "weights", "sync", "kv_cache"], ("cuda_graph", "weights"), ("kv_cache",)),
    ),
)
def test_a_tag_wakes_with_the_stage_that_it_stands_in(wake, before, after):
    sleep = ["weights", "kv_cache", "cuda_graph"]
    order = StageOrder.of(SECTION, sleep, wake)
    assert order == StageOrder(tuple(sleep), before, after)
    assert order.wake == tuple(wake)
    assert order.releases_graphs


REFUSED = {
    "unknown tag": (["kv_cache", "weights", "lora"], WAKE, "sleep_order", "unknown 'lora'"),
    "sync asleep": (["kv_cache", "weights", "sync"], WAKE, "sleep_order", "unknown 'sync'"),
    "twice": (["kv_cache", "weights", "weights"], WAKE, "sleep_order", "a name comes twice"),
    "no list": ("weights", WAKE, "sleep_order", "expected a list of kv_cache, weights, cuda_graph"),
    "empty": ([], WAKE, "sleep_order", "'weights' is missing; to keep all memory resident set"),
    "no kv cache": (["weights"], WAKE, "sleep_order", "'kv_cache' is missing"),
    "other tags": (["kv_cache", "weights", "cuda_graph"], WAKE, "wake_order", "the same tags"),
    "more tags": (SLEEP, [*WAKE, "cuda_graph"], "wake_order", "expected the same tags, and 'sync'"),
    "no sync": (SLEEP, ["weights", "kv_cache"], "wake_order", "expected the same tags, and 'sync'"),
    "sync first": (SLEEP, ["sync", "weights", "kv_cache"], "wake_order", "before 'sync'"),
    "kv before": (SLEEP, ["weights", "kv_cache", "sync"], "wake_order", "'kv_cache' after it"),
    "kv first": (SLEEP, ["kv_cache", "weights", "sync"], "wake_order", "'kv_cache' after it"),
}


@pytest.mark.parametrize(("sleep", "wake", "key", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_an_impossible_order_is_refused_by_key_and_value(sleep, wake, key, text):
    value = sleep if key == "sleep_order" else wake
    with pytest.raises(ValueError, match=re.escape(f"{SECTION}.{key}={value!r}")) as error:
        StageOrder.of(SECTION, sleep, wake)
    assert text in str(error.value)
