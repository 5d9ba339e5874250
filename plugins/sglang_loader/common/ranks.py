"""The ranks that do one thing together: those of a trainer in a sync, or those of an engine.

    ranks.gather(item)     every rank's item, by rank
    ranks.all(holds)       True if a condition holds on all ranks
    ranks.step(work)       run this rank's part of a step that may fail without harm
    ranks.poll(work)       repeat this rank's part until it is done on all ranks at once
    ranks.check(error)     raise on all ranks if any of them has failed

Each rank makes the same calls in the same order. Only a rank that fails leaves that order: it calls
`check(error)`. The other ranks may be in any of the five calls. Each rank then raises `RanksFailed`
with the same failures, so no rank waits for one that has failed.

    with ranks.section():      # an exception of the body is checked
        part = prepare()       # this rank's part
        ranks.gather(part)

A section bounds what a late failure ends. If a rank fails after the others have left the section,
only that rank raises.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")


class RanksFailed(RuntimeError):
    """A failure that all ranks raise.

    Attributes:
        failures: "rank R: traceback" of every rank that failed, equal on all ranks.
        is_alone: this rank can meet no other one in this section any more.
    """

    is_alone = False

    def __init__(self, text: str, failures: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.failures = tuple(failures) or (text,)


class Interrupted(RanksFailed):
    """An interrupt of this rank, such as a KeyboardInterrupt, for which all ranks fail.

    The outermost section raises the interrupt itself.
    """


@dataclass(frozen=True)
class Reason:
    """The reason why a step was not done.

    Attributes:
        text: for the log.
        is_final: trying again cannot help. False: the error may pass, such as a lack of memory.
    """

    text: str
    is_final: bool

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Turn:
    """The part of one rank in one exchange.

    Attributes:
        section: number of sections that the rank has left.
        item: what the rank gives to the others.
        failure: why the rank has failed, or None.
        same: a value that must be equal on all ranks.
    """

    section: int
    item: Any = None
    failure: str | None = None
    same: object = None


class Ranks:
    """All ranks, as one of them sees them. This class is for a rank on its own.

    Subclasses override `_exchange`.

    Attributes:
        replica_ranks: the ranks that share this rank's rollout replica, its leader first.
    """

    name = "rank"
    """The word for a rank in messages."""

    def __init__(self) -> None:
        self._section = 0  # number of outermost sections that this rank has left
        self._depth = 0  # of sections within each other
        self.replica_ranks: tuple[int, ...] = (0,)

    def gather(self, item: Item) -> list[Item]:
        """Return every rank's item, by rank.

        Raises:
            RanksFailed: on every rank, if a rank has failed. All five methods raise it.
        """
        return [turn.item for turn in self._turns(item)]

    def all(self, holds: bool) -> bool:
        """Return True if a condition holds on all ranks."""
        return all(self.gather(holds))

    def step(
        self,
        work: Callable[[], Item],
        *final: type[Exception],
        passing: tuple[type[Exception], ...] = (),
    ) -> tuple[Item | None, Reason | None]:
        """Run this rank's part of a step that all ranks do, or that is left out.

        Args:
            work: this rank's part. It must make no call that other ranks wait for.
            final: see `attempt`.
            passing: see `attempt`.

        Returns:
            The part's result and None, or None and the reasons of the ranks that failed.
        """
        result, own = attempt(work, *final, passing=passing)
        reason = self.common_reason(own)
        return (result, None) if reason is None else (None, reason)

    def poll(
        self,
        work: Callable[[], Item | None],
        *,
        same: object = None,
        differ: str = "the ranks differ",
    ) -> list[Item]:
        """Repeat this rank's part until it is done on all ranks at once.

        Args:
            work: returns an item if the part is done, else None. It must not wait long. A part
                that is done is called again.
            same: a value that must be equal on all ranks.
            differ: the failure if the values differ.

        Returns:
            Every rank's item, by rank.
        """
        # The ranks meet after each call, so that a rank that fails is noticed in time.
        while True:
            turns = self._turns(work(), same, differ)
            if None not in (items := [turn.item for turn in turns]):
                return items

    def check(self, error: BaseException | None = None) -> None:
        """Raise on all ranks if a rank has failed.

        Args:
            error: the failure of this rank, or None. One that all ranks raise already is only
                raised again.

        Raises:
            RanksFailed: its cause is the failure of this rank, if any.
            Interrupted: instead of it, for an interrupt of this rank.
        """
        if error is None:
            self._turns(None)
            return
        # All ranks know of it already.
        if isinstance(error, RanksFailed):
            raise error
        failure = "".join(traceback.format_exception(error))
        drop_frames(error)
        try:
            self._turns(None, failure=failure)
            failed = self._failed(f"{failure}(the other ranks had ended before)", [failure])
            failed.is_alone = True
        except RanksFailed as shared:
            failed = shared
        # An interrupt is no failure to recover from: it must reach the user.
        if not isinstance(error, Exception):
            is_alone, failed = failed.is_alone, Interrupted(str(failed), failed.failures)
            failed.is_alone = is_alone
        raise failed from error

    @contextmanager
    def section(self) -> Iterator[None]:
        """Check any exception of the body. A section within another one only does that."""
        self._depth += 1
        try:
            yield
        except BaseException as error:
            self._check_at_end(error)
        finally:
            self._depth -= 1
            # Inner sections are not counted: a rank that fails early begins none.
            self._section += not self._depth

    def _check_at_end(self, error: BaseException) -> None:
        try:
            self.check(error)
        except Interrupted as interrupted:
            if self._depth > 1 or interrupted.__cause__ is None:
                raise
            raise interrupted.__cause__ from None

    def common_reason(self, own: Reason | None) -> Reason | None:
        """Return the reasons of all ranks as one, or None if no rank has any."""
        reasons = self.gather(own)
        texts = [f"{self.name} {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
        is_final = any(reason is not None and reason.is_final for reason in reasons)
        return Reason("\n".join(texts), is_final) if texts else None

    def _exchange(self, turn: Turn) -> list[Turn]:
        """Return every rank's turn, by rank."""
        return [turn]

    def _begin_turn(self) -> None:
        """Prepare an exchange, which may begin the count of sections anew."""

    def _failed(self, text: str, failures: Sequence[str]) -> RanksFailed:
        """Return the error that all ranks raise."""
        return RanksFailed(text, failures)

    def _turns(
        self, item: object, same: object = None, differ: str = "", *, failure: str | None = None
    ) -> Sequence[Turn]:
        """Exchange turns with the other ranks.

        Returns:
            Nothing if the other ranks have left this section.
        """
        while True:
            # An example: rank 2 fails late in section 4, when ranks 0 and 1 are in section 5.
            # Rank 2 ends section 4 alone. Ranks 0 and 1 repeat their turn until rank 2 is in
            # section 5, too.
            self._begin_turn()
            own = Turn(self._section, item, failure, same)
            turns = self._exchange(own)
            newest = max(turn.section for turn in turns)
            if own.section < newest:
                if failure is None:
                    raise self._failed("the other ranks are in a later section", ())
                return ()
            # A rank that fails late takes its turn in a section that this rank has left.
            if all(turn.section == newest for turn in turns):
                break
        failures = [
            f"{self.name} {rank}: {turn.failure}" for rank, turn in enumerate(turns) if turn.failure
        ]
        # A rank that failed has no value to compare, and its failure says more.
        if not failures and len({turn.same for turn in turns}) > 1:
            values = [f"{self.name} {rank}: {turn.same}" for rank, turn in enumerate(turns)]
            failures = [f"{differ}: {', '.join(values)}"]
        if failures:
            raise self._failed("\n".join(failures), failures)
        return turns


def attempt(
    work: Callable[[], Item],
    *final: type[Exception],
    passing: tuple[type[Exception], ...] = (),
) -> tuple[Item | None, Reason | None]:
    """Run a step of this rank alone.

    Args:
        work: must make no call that other ranks wait for.
        final: errors of which the message is enough, and which trying again cannot help.
        passing: errors of which the message is enough, and which may pass. Any other error may
            pass as well, and its reason has the traceback.

    Returns:
        The step's result and None, or None and the error as a reason.
    """
    try:
        return work(), None
    except final as error:
        return None, Reason(str(error), is_final=True)
    except passing as error:
        return None, Reason(str(error), is_final=False)
    except Exception:
        return None, Reason(traceback.format_exc(), is_final=False)


def drop_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of its causes, whose frames keep tensors in memory."""
    pending, seen = [error], set[int]()
    while pending:
        error = pending.pop()
        # An error that is raised again may be the cause of its own cause.
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            error.with_traceback(None)
            pending += [error.__cause__, error.__context__]
