"""Delivery of buckets that engine ranks read in the trainer ranks' parameters."""

from __future__ import annotations

from collections.abc import Sequence

from verl_sglang_sync.engine.engine_ranks import EngineRank
from verl_sglang_sync.routes.pull.located import Reader
from verl_sglang_sync.routes.route import ReadyBucket


class PulledDelivery:
    """See `Delivery`; the engines map the parameters of all ranks with the first bucket.

    Args:
        engines: of this rank.
        readers: where each of them finds the buckets.
        keep: they keep mapped what they map.

    Raises:
        BlockNotMapped: an engine has not mapped a block of which there is no handle any more.
    """

    def __init__(
        self, engines: Sequence[EngineRank], readers: Sequence[Reader], *, keep: bool
    ) -> None:
        self._pairs = list(zip(engines, readers, strict=True))
        for engine, reader in self._pairs:
            engine.session.map_blocks(reader.blocks, keep=keep)

    def deliver(self, ready: ReadyBucket) -> bool:
        """See `Delivery`."""
        for engine, reader in self._pairs:
            with engine.naming():
                pieces = reader.pieces[ready.index]
                engine.session.load(ready.index, ready.bucket, pieces, read_only=True)
        return True

    def make_room(self) -> None:
        """See `Delivery`: nothing, the parameters are not written in a sync."""
