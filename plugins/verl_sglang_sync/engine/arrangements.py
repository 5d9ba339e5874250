"""What an engine rank reads of each bucket (an arrangement), as it has told after a sync.

Routes "exchange" and "send" bring an engine rank those bytes alone; an exported sync whole buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
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

    def is_arranged(self, index: int) -> bool:
        """The rank gets what it reads of a bucket alone, which may be nothing."""
        return index < len(self.buckets) and self.buckets[index][1] is not None

    def expected(self, index: int, whole: Arrangement) -> Arrangement:
        """What it is sent of a bucket; `whole`: all of that."""
        found = self.buckets[index][1] if index < len(self.buckets) else None
        return whole if found is None else found


NOTHING_KNOWN = KnownArrangements()


class EngineArrangements:
    """What one engine rank reads of each bucket, as it has said after a sync.

    Args:
        is_wanted: False: the engine is not asked.
        replica: number of its replica, of those that this trainer rank has sessions with.

    Attributes:
        reads_in_place: it reads the trainer's parameters, and is sent nothing.
    """

    def __init__(self, *, is_wanted: bool, replica: int = 0) -> None:
        self.replica = replica
        self.reads_in_place = False
        self._is_wanted = is_wanted
        self._known = NOTHING_KNOWN

    @property
    def known_digest(self) -> str | None:
        """What the engine need not say again; None where it need not say anything."""
        return self._known.digest if self._is_wanted else None

    def matching(self, sent: Iterable[Bucket]) -> KnownArrangements:
        """What is known, if it speaks of these buckets; else nothing."""
        layouts = [layout for layout, _ in self._known.buckets]
        return self._known if layouts == [bucket.digest for bucket in sent] else NOTHING_KNOWN

    def learn(self, encoded: bytes, sent: Iterable[Bucket]) -> None:
        """Take what the engine offers for the buckets that were sent."""
        layouts = {bucket.digest: bucket.layout for bucket in sent}
        try:
            buckets = decode_arrangements(encoded, layouts)
        except WireError as error:
            self._is_wanted = False
            self.forget()
            logger.warning(
                "buckets are sent whole, the engine's arrangements do not fit: %s", error
            )
        else:
            self._known = KnownArrangements(digest_of(encoded), buckets)

    def forget(self) -> None:
        """The next sync is made as the first one was."""
        self._known = NOTHING_KNOWN
