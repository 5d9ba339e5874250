"""The arrangements that engine ranks have offered: the parts of each bucket that a rank reads.

Routes "exchange" and "send" bring an engine rank only those bytes. Exported buckets come whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_loader.common.layout import Arrangements, WireError, decode_arrangements, digest_of
from sglang_loader.common.regions.arrangement import Arrangement
from verl_sglang_sync.sources.bucket_cutter import Bucket

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankArrangements:
    """The arrangements of one engine rank for the buckets of a sync.

    Attributes:
        digest: names them on the wire.
        buckets: by index the digest of the layout, and the arrangement. A bucket without an entry,
            or with None as its arrangement, is sent whole.
    """

    digest: str = ""
    buckets: Arrangements = ()

    def is_arranged(self, index: int) -> bool:
        """Return True if the rank gets only the bytes that it reads of the bucket, maybe none."""
        return index < len(self.buckets) and self.buckets[index][1] is not None

    def expected(self, index: int, whole: Arrangement) -> Arrangement:
        """Return the bucket's arrangement, or `whole` if it has none."""
        arrangement = self.buckets[index][1] if index < len(self.buckets) else None
        return whole if arrangement is None else arrangement


NO_ARRANGEMENTS = RankArrangements()


class EngineArrangements:
    """One engine rank's last arrangements, kept from sync to sync.

    Args:
        is_wanted: False: the engine is not asked for any.
        replica: number of its replica among those that this trainer rank has sessions with.

    Attributes:
        reads_in_place: the rank reads the trainer's parameters, and is sent nothing.
        proven_plan: name of the load plan with which the route to this rank was proven.
    """

    def __init__(self, *, is_wanted: bool, replica: int = 0) -> None:
        self.replica = replica
        self.reads_in_place = False
        self.proven_plan = ""
        self._is_wanted = is_wanted
        self._held = NO_ARRANGEMENTS

    @property
    def held_digest(self) -> str | None:
        """Digest of the arrangements that are held, or None if the engine need not offer any."""
        return self._held.digest if self._is_wanted else None

    def matching(self, sent: Iterable[Bucket]) -> RankArrangements:
        """Return the arrangements that are held, or none if they are for other buckets."""
        layouts = [layout for layout, _ in self._held.buckets]
        return self._held if layouts == [bucket.digest for bucket in sent] else NO_ARRANGEMENTS

    def learn(self, encoded: bytes, sent: Iterable[Bucket]) -> None:
        """Hold the arrangements that the engine offers for the buckets that were sent."""
        layouts = {bucket.digest: bucket.layout for bucket in sent}
        try:
            buckets = decode_arrangements(encoded, layouts)
        except WireError as error:
            self._is_wanted = False
            self.forget()
            text = "an engine rank is sent whole buckets: its arrangements do not fit them: %s"
            logger.warning(text, error)
        else:
            self._held = RankArrangements(digest_of(encoded), buckets)

    def forget(self) -> None:
        """Send whole buckets, until the engine offers arrangements again."""
        self._held = NO_ARRANGEMENTS
