"""One sync, from the trainer's export to live weights: rounds of one bucket, all ranks in step.

Every trainer rank of every replica runs `run_sync` at the same time, because the export is
collective. In each round a rank exports and packs its next bucket, all ranks agree that nobody
failed, each replica's leader gathers the handles of its TP ranks and has the engine load them.

A failure anywhere ends the rounds on all ranks: they drain what is left of the export (its
collectives need everyone) and all raise the same `WeightSyncError`.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import closing, suppress

import torch

from sglang_loader.ipc import serialize_handles
from verl_sglang_sync.collective import RoundResult, RoundState, TrainerGroup
from verl_sglang_sync.packing import NamedTensor, Packer, Parcel
from verl_sglang_sync.report import SyncReport

EMBEDDING = "embed_tokens.weight"
"""How the name of an embedding ends that mbridge may export twice."""

Spec = tuple[str, torch.dtype, torch.Size]
"""(name, dtype, shape) of an exported tensor."""

LoadBucket = Callable[[list[bytes], Parcel], Awaitable[None]]
"""`load(handles, parcel)`: has the engine load one bucket; called on the leader only."""


class WeightSyncError(RuntimeError):
    """A sync failed; the engine's weights are partly overwritten and must not be used."""


async def run_sync(
    weights: Iterable[NamedTensor] | Export,
    *,
    packer: Packer,
    group: TrainerGroup,
    load: LoadBucket,
    report: SyncReport,
) -> None:
    """Send all of `weights` to the engine of this rank's replica.

    Args:
        weights: the trainer's export of `(name, full tensor)`; always run to its end.
        packer: a fresh packer.
        group: the trainer's ranks.
        load: posts one bucket to the engine; used on the replica's leader.
        report: gets counts and seconds.

    Raises:
        WeightSyncError: on every rank, if any rank failed; the message has rank and traceback.
    """
    source = weights if isinstance(weights, Export) else Export(weights)
    failure: str | None = None
    with closing(_Rounds(packer.parcels(source), source)) as rounds:
        while True:
            state, parcel, message = rounds.next()
            failure = failure or message
            if failure is not None and state < RoundState.FAILED:
                state = RoundState.FAILED
            result = group.agree(state, failure, parcel.plan.signature if parcel else 0)
            if parcel is None or not result.same_bucket:
                break
            failure = await _send(parcel, group, load, report)
            # Only the leader has waited for the engine. Its other ranks may still be reading their
            # trainers' staging buffers, which the next bucket is packed into.
            group.agree(RoundState.BUCKET, None)
            del parcel  # before the next bucket is exported
    if set(result.states) == {RoundState.END} and report.num_buckets:
        return
    if result.worst is not RoundState.EXPORT_FAILED:
        source.drain()
    raise WeightSyncError(_message(result))


async def _send(
    parcel: Parcel, group: TrainerGroup, load: LoadBucket, report: SyncReport
) -> str | None:
    """Share one bucket and have it loaded; return the traceback of a failure on this rank.

    Every rank joins the gather even if its own handles failed, so that nobody waits for it.
    """
    failure, handles = None, b""
    try:
        handles = serialize_handles(parcel.named_tensors)
    except Exception:
        failure = traceback.format_exc()
    gathered = group.gather(handles)
    if gathered is None or failure is not None:
        return failure
    if not all(gathered):
        return None  # the failing rank reports in the next round
    try:
        with report.stage("load"):
            await load(gathered, parcel)
    except Exception:
        return traceback.format_exc()
    return None


class ExportChanged(ValueError):
    """The export is not what its manifest announced."""


class Export:
    """The trainer's generator, with its failures told apart from the packer's.

    A tied embedding comes once: Megatron's last pipeline stage has a copy of it for the output
    layer, and mbridge exports that under the embedding's name again.

    Args:
        weights: the export.
        announced: what it must yield, in order; None if that is not known.
        must_equal: False: a difference is noted (`has_changed`), not raised.
        remember: keep what was yielded in `specs`, where nothing was announced.
    """

    def __init__(
        self,
        weights: Iterable[NamedTensor],
        announced: list[Spec] | None = None,
        *,
        must_equal: bool = True,
        remember: bool = False,
    ) -> None:
        self._source = iter(weights)
        self._embeddings: dict[str, torch.Size] = {}
        self._must_equal = must_equal
        self.specs: list[Spec] = []
        self.failed = False
        self.has_changed = False
        self._stream = self._distinct()
        if announced is not None:
            self._stream = self._compared(self._stream, announced)
        elif remember:
            self._stream = self._remembered(self._stream)

    # Generators, one around the other: 18,867 tensors a sync cost Python next to nothing there.
    def __iter__(self) -> Iterator[NamedTensor]:
        return self._stream

    def __next__(self) -> NamedTensor:
        return next(self._stream)

    def _distinct(self) -> Iterator[NamedTensor]:
        try:
            for item in self._source:
                if item[0].endswith(EMBEDDING) and self._is_copy(*item):
                    continue
                yield item
                del item  # the next one is made when this one may be gone
        except GeneratorExit:
            raise
        except BaseException:
            self.failed = True
            raise

    def _remembered(self, stream: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        for name, tensor in stream:
            self.specs.append((name, tensor.dtype, tensor.shape))
            yield name, tensor
            del tensor

    def _compared(
        self, stream: Iterator[NamedTensor], announced: list[Spec]
    ) -> Iterator[NamedTensor]:
        position = -1
        for position, (name, tensor) in enumerate(stream):
            want = announced[position] if position < len(announced) else None
            if not self.has_changed and (
                want is None
                or name != want[0]
                or tensor.dtype is not want[1]
                or tensor.shape != want[2]
            ):
                self._note_change(position, want, (name, tensor.dtype, tensor.shape))
            yield name, tensor
            del tensor
        if not self.has_changed and position + 1 < len(announced):
            self._note_change(position + 1, announced[position + 1], None)

    def _note_change(self, position: int, want: Spec | None, found: Spec | None) -> None:
        """A tensor, or the end (None), came where the manifest has something else; said once."""
        self.has_changed = True
        if self._must_equal:
            raise ExportChanged(describe_change(position, want, found))

    def _is_copy(self, name: str, tensor: torch.Tensor) -> bool:
        if name in self._embeddings:
            return self._embeddings[name] == tensor.shape  # else the planner refuses it
        self._embeddings[name] = tensor.shape
        return False

    def drain(self) -> None:
        """Run the export to its end, dropping the tensors: its collectives need every rank, unless
        it is what broke.
        """
        if self.failed:
            return
        with suppress(Exception):
            for _ in self._source:
                pass


def describe_change(position: int, wanted: Spec | None, found: Spec | None) -> str:
    """Where an export left its manifest, in words; None stands for the end."""
    return (
        f"tensor {position} of the export is {_in_words(found)}, its manifest has "
        f"{_in_words(wanted)} there; what the trainer sends must stay the same from sync to sync"
    )


def _in_words(spec: Spec | None) -> str:
    return "none" if spec is None else f"{spec[0]} {spec[1]} {list(spec[2])}"


class _Rounds:
    """Steps through the packer; a failure becomes a state instead of an exception."""

    def __init__(self, parcels: Iterator[Parcel], source: Export) -> None:
        self._parcels = parcels
        self._source = source

    def next(self) -> tuple[RoundState, Parcel | None, str | None]:
        """Return this rank's state, its bucket if there is one, and its traceback if it failed."""
        try:
            parcel = next(self._parcels, None)
        except Exception:
            state = RoundState.EXPORT_FAILED if self._source.failed else RoundState.FAILED
            return state, None, traceback.format_exc()
        return (RoundState.BUCKET if parcel else RoundState.END), parcel, None

    def close(self) -> None:
        """Let go of the packer's tensors."""
        if close := getattr(self._parcels, "close", None):
            close()


def _message(result: RoundResult) -> str:
    if result.failures:
        return "weight sync failed; the engine's weights are incomplete\n" + "\n".join(
            result.failures
        )
    if set(result.states) == {RoundState.END}:
        return "weight sync failed: the trainer exported no tensor"
    return (
        "weight sync failed: the ranks exported different tensors; by rank, this round's state: "
        f"{[state.name for state in result.states]}, tensors in its bucket: "
        f"{[signature >> 32 for signature in result.signatures]}, checksum of their names: "
        f"{[signature & 0xFFFFFFFF for signature in result.signatures]}"
    )
