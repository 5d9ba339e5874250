"""Memory tags of SGLang, and the order in which they are released and resumed.

`cuda_graph` is the memory of the decoding graphs. With `release_cuda_graphs` our replica launches
SGLang with these graphs under the memory saver. Otherwise the graphs stay resident.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"
SYNC = "sync"


@dataclass(frozen=True)
class StageOrder:
    """The tags in the order of a sleep and of a wake-up.

    Attributes:
        sleep: tags to release.
        before_sync: tags to resume before the sync, at verl's `resume(tags=["weights"])`.
        after_sync: tags to resume after the sync, when the trainer has freed its memory, at verl's
            `resume(tags=["kv_cache"])`.
    """

    sleep: tuple[str, ...]
    before_sync: tuple[str, ...]
    after_sync: tuple[str, ...]

    @property
    def wake(self) -> tuple[str, ...]:
        """The tags to resume in order, with the sync between them."""
        return (*self.before_sync, SYNC, *self.after_sync)


VERLS_ORDER = StageOrder((KV_CACHE, WEIGHTS), (WEIGHTS,), (KV_CACHE,))
ORDER_WITH_GRAPHS = StageOrder((KV_CACHE, CUDA_GRAPH, WEIGHTS), (WEIGHTS,), (CUDA_GRAPH, KV_CACHE))
