"""What an engine rank reads of a sync's buckets, as it has said after one: an arrangement of each.

Trainer ranks that send of their shards ("exchange", "send") send each engine rank that alone; a
sync that exports sends whole buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_loader.common.layout import Arrangements, WireError, decode_arrangements, digest_of
from sglang_loader.common.regions.arrangement import Arrangement
from verl_sglang_sync.sources.bucket_stream import Bucket

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownArrangements:
    """What one engine rank reads of each bucket.

    Attributes:
        digest: names them on the wire.
        buckets: (digest of the layout, arrangement) by index; None: the bucket is sent whole, as
            is every bucket after these.
    """

    digest: str = ""
    buckets: Arrangements = ()

    @classmethod
    def of(cls, encoded: bytes, sent: Iterable[Bucket]) -> KnownArrangements:
        """What the engine offers for buckets that were sent; `WireError` where it does not fit."""
        layouts = {bucket.digest: bucket.layout for bucket in sent}
        return cls(digest_of(encoded), decode_arrangements(encoded, layouts))

    def fits(self, sent: Iterable[Bucket]) -> bool:
        return [layout for layout, _ in self.buckets] == [bucket.digest for bucket in sent]

    def expected(self, index: int) -> Arrangement | None:
        return self.buckets[index][1] if index < len(self.buckets) else None


NOTHING_KNOWN = KnownArrangements()


class EngineArrangements:
    """What one engine rank reads of each bucket, as it has said after a sync.

    Args:
        is_wanted: False: the engine is not asked.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self.known = NOTHING_KNOWN

    def known_digest(self, sent: Sequence[Bucket]) -> str | None:
        """What the engine need not say again; None where it need not say anything."""
        if not self._is_wanted or not sent:
            return None
        return self.known.digest

    def fitting(self, sent: Iterable[Bucket]) -> KnownArrangements:
        """What is known, if it speaks of these buckets; else nothing."""
        return self.known if self.known.fits(sent) else NOTHING_KNOWN

    def learn(self, encoded: bytes, sent: Iterable[Bucket]) -> None:
        try:
            self.known = KnownArrangements.of(encoded, sent)
        except WireError as error:
            self._is_wanted = False
            logger.warning(
                "buckets are sent whole, the engine's arrangements do not fit: %s", error
            )

    def forget(self) -> None:
        """The next sync is made as the first one was."""
        self.known = NOTHING_KNOWN
