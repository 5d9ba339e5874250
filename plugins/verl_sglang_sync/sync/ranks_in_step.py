"""The outcome of one sync so far, on which all trainer ranks agree."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable
from typing import TypeVar

from verl_sglang_sync.collective import RankLost, TrainerGroup, WeightSyncError
from verl_sglang_sync.engine.engine_ranks import drop_frames
from verl_sglang_sync.sources.bucket_stream import Bucket

Result = TypeVar("Result")

MAY_BE_INCOMPLETE = "the engine's weights may be incomplete"
MAY_SERVE = "the engine may serve the new weights already"


class RanksInStep:
    """Runs the steps of one rank, and keeps its failure and the error that all ranks agreed on.

    Attributes:
        error: the message that all ranks will raise, or None.
        cause: the first exception on this rank, or None.
        may_be_served: this rank has told its engine to publish, which has not refused.
        num_buckets: number of buckets that this rank has sent.
        num_tensors: number of their tensors.
        asks_for_proof: an engine of this rank wants this sync proven.
        wants_proof: an engine of any rank does, and all ranks can; as they have agreed last.

    Args:
        can_prove: this rank can make the export once more.
    """

    def __init__(self, group: TrainerGroup, *, can_prove: bool = False) -> None:
        self.asks_for_proof = self.wants_proof = False
        self._can_prove = can_prove
        self.error: str | None = None
        self._group = group
        self.cause: Exception | None = None
        self.may_be_served = False
        self._failure: str | None = None
        self._is_rank_lost = False
        self.num_buckets = self.num_tensors = 0
        self._checksum = 0

    @property
    def has_failed(self) -> bool:
        """True if this rank or another one has failed."""
        return self.error is not None or self._failure is not None

    def run_if_ok(self, step: Callable[[], Result]) -> Result | None:
        """Run a step unless a rank has failed; if it raises, keep the traceback and return None."""
        return None if self.has_failed else self.run_always(step)

    def run_always(self, step: Callable[[], Result]) -> Result | None:
        """Like `run_if_ok`, but also after a failure: for steps with collectives.

        Raises:
            RankLost: a rank is lost in one of them; all ranks leave.
        """
        try:
            return step()
        except RankLost:
            raise
        except Exception as error:
            self.cause = self.cause or error
            self._failure = self._failure or traceback.format_exc()
            drop_frames(error)
            return None

    def repeat_until_all(self, step: Callable[[], bool]) -> bool:
        """Repeat a step until it returns True on all ranks at once; False after a failure. A rank
        agrees with the others after each time, so the step must not wait long.
        """
        is_done = False
        while self.error is None:
            is_done = bool(self.run_if_ok(step))
            if self.agree(is_ready=is_done):
                return True
        return False

    def count(self, bucket: Bucket) -> None:
        """Count a sent bucket, and add it to the checksum that ranks compare."""
        self.num_buckets += 1
        self.num_tensors += len(bucket.layout.tensors)
        self._checksum = zlib.crc32(bucket.digest.encode(), self._checksum)

    def agree(self, *, is_ready: bool = True, learnt_since: str | None = None) -> bool:
        """Exchange outcomes and checksums with all ranks; False if the sync cannot go on. Once a
        rank is lost it does nothing: the others have left, too.

        Args:
            is_ready: False: this rank still waits for its engine; then all ranks must agree again.
            learnt_since: details to add to the error that ranks have agreed on.
        """
        if self._is_rank_lost:
            return False
        exported = self.num_tensors, self._checksum
        # The wish of a proof costs no collective of its own.
        signature = exported, self.asks_for_proof, self._can_prove
        try:
            failure = self._failure if self.error is None else learnt_since
            result = self._group.agree(failure, is_ready=is_ready, signature=signature)
        except RankLost as error:
            self._is_rank_lost = True
            told = (str(error), MAY_SERVE if self.may_be_served else None, self._failure)
            if self.error is not None:
                told = (self.error, str(error), learnt_since)
            self.error = "\n".join(filter(None, told))
            return False
        if self.error is not None:
            self.error = "\n".join((self.error, *result.failures))
            return False
        counts, asking, able = zip(*result.signatures, strict=True)
        self.wants_proof = any(asking) and all(able)
        if result.failures:
            reasons = "\n".join(result.failures)
            state = MAY_SERVE if self.may_be_served else MAY_BE_INCOMPLETE
            self.error = f"weight sync failed; {state}\n{reasons}"
        elif len(set(counts)) > 1:
            numbers, checksums = map(list, zip(*counts, strict=True))
            self.error = (
                "weight sync failed: the trainer ranks exported different tensors; by rank, their "
                f"numbers: {numbers}, checksums of names, shapes and dtypes: {checksums}"
            )
        return self.error is None and result.is_ready

    def raise_error(self) -> None:
        """Raise the error that all ranks agreed on, if any.

        Raises:
            WeightSyncError: on every rank; `RankLost` if one of them did not answer.
        """
        if self.error is not None:
            raise (RankLost if self._is_rank_lost else WeightSyncError)(self.error)
