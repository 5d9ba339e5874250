"""Order in which the engine's memory is released and resumed: `sleep_order` and `wake_order`.

The tags are SGLang's. `cuda_graph` is the memory of the decoding graphs; if the orders have it, our
replica launches SGLang with those graphs under the memory saver, else they stay resident. `sync` in
`wake_order` is the weight sync: tags before it are resumed with the weights (verl's
`resume(tags=["weights"])`), tags after it with the KV cache, when the trainer has freed its memory
(`resume(tags=["kv_cache"])`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"
SYNC = "sync"
TAGS = (KV_CACHE, WEIGHTS, CUDA_GRAPH)

# verl's own.
SLEEP_ORDER = (KV_CACHE, WEIGHTS)
WAKE_ORDER = (WEIGHTS, SYNC, KV_CACHE)


@dataclass(frozen=True)
class StageOrder:
    """The tags in the order of a sleep and of a wake-up.

    Attributes:
        sleep: tags to release.
        before_sync: tags to resume before the sync; "weights" is one.
        after_sync: tags to resume after it; "kv_cache" is one.
    """

    sleep: tuple[str, ...]
    before_sync: tuple[str, ...]
    after_sync: tuple[str, ...]

    @property
    def wake(self) -> tuple[str, ...]:
        return (*self.before_sync, SYNC, *self.after_sync)

    @property
    def releases_graphs(self) -> bool:
        return CUDA_GRAPH in self.sleep

    @classmethod
    def of(cls, section: str, sleep: Any, wake: Any) -> StageOrder:
        """Read the two lists of a section; `ValueError` names key, value and what is allowed."""
        sleep = _names(f"{section}.sleep_order", sleep, TAGS)
        wake = _names(f"{section}.wake_order", wake, (*TAGS, SYNC))
        for name in (WEIGHTS, KV_CACHE):
            if name not in sleep:
                raise ValueError(
                    f"{section}.sleep_order={list(sleep)}: {name!r} is missing; to keep all memory "
                    "resident set actor_rollout_ref.rollout.free_cache_engine=False"
                )
        if set(wake) != {*sleep, SYNC}:
            raise ValueError(
                f"{section}.wake_order={list(wake)} with sleep_order={list(sleep)}: expected the "
                f"same tags, and {SYNC!r}"
            )
        if not wake.index(WEIGHTS) < wake.index(SYNC) < wake.index(KV_CACHE):
            raise ValueError(
                f"{section}.wake_order={list(wake)}: expected {WEIGHTS!r}, which the sync writes, "
                f"before {SYNC!r}, and {KV_CACHE!r} after it"
            )
        cut = wake.index(SYNC)
        return cls(sleep, wake[:cut], wake[cut + 1 :])


def _names(key: str, value: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{key}={value!r}: expected a list of {', '.join(allowed)}")
    for name in value:
        if name not in allowed:
            raise ValueError(
                f"{key}={list(value)}: unknown {name!r}; allowed: {', '.join(allowed)}"
            )
    if len(set(value)) != len(value):
        raise ValueError(f"{key}={list(value)}: a name comes twice")
    return tuple(value)
