"""What the trainer ranks of one sync agree on."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable
from typing import TypeVar

from verl_sglang_sync.collective import (
    RankLost,
    TrainerGroup,
    WeightSyncError,
    export_signature,
)
from verl_sglang_sync.engine.engine_ranks import drop_frames
from verl_sglang_sync.sources.bucket_stream import Bucket

Result = TypeVar("Result")

MAY_BE_INCOMPLETE = "the engine's weights may be incomplete"
MAY_SERVE = "the engine may serve the new weights already"


class RanksInStep:
    """This rank's success so far, and what all ranks agreed on.

    Attributes:
        error: the message that all ranks raise; None while all is well.
        cause: what went wrong first on this rank.
        may_be_served: this rank has told its engine to publish, and not heard that it does not.
        num_buckets: sent by this rank in this sync.
        num_tensors: likewise.
    """

    def __init__(self, group: TrainerGroup) -> None:
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
        """Run a step unless a rank has failed; keep the traceback if it fails now."""
        return None if self.has_failed else self.run_always(step)

    def run_always(self, step: Callable[[], Result]) -> Result | None:
        """As `run_if_ok`, but also after a failure: others wait in the step's collectives.

        Raises:
            RankLost: one of those collectives has lost a rank, and the others leave, too.
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
        """Repeat a step, all ranks in step, until it was True on every rank; False after a failure.

        A rank whose step was True takes it again while others wait; it must not wait itself then.
        """
        is_done = False
        while self.error is None:
            is_done = bool(self.run_if_ok(step))
            if self.agree(is_ready=is_done):
                return True
        return False

    def count(self, bucket: Bucket) -> None:
        """Count a bucket into what the ranks compare."""
        self.num_buckets += 1
        self.num_tensors += len(bucket.layout.tensors)
        self._checksum = zlib.crc32(bucket.digest.encode(), self._checksum)

    def agree(self, *, is_ready: bool = True, learnt_since: str | None = None) -> bool:
        """Exchange outcomes and checksums with all ranks; False if the sync cannot go on.

        Nobody is asked any more once a rank is lost: the others have left, too.

        Args:
            is_ready: False: this rank still waits for its engine; then all ranks must ask again.
            learnt_since: once the ranks have agreed on an error: what more is to be told of it.
        """
        if self._is_rank_lost:
            return False
        signature = export_signature(self.num_tensors, self._checksum)
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
        if result.failures:
            reasons = "\n".join(result.failures)
            state = MAY_SERVE if self.may_be_served else MAY_BE_INCOMPLETE
            self.error = f"weight sync failed; {state}\n{reasons}"
        elif result.export_difference is not None:
            self.error = f"weight sync failed: {result.export_difference}"
        return self.error is None and result.is_ready

    def raise_error(self) -> None:
        """Raise what all ranks agreed went wrong, if anything did.

        Raises:
            WeightSyncError: on every rank; `RankLost` where one of them did not answer.
        """
        if self.error is not None:
            raise (RankLost if self._is_rank_lost else WeightSyncError)(self.error)
