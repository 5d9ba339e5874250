"""The compiled load plan: what to do with each bucket so that every byte lands where the model's
own loader puts it.

A `LoadPlan` is made once (`compiler`), executed many times (`executor`), and for each bucket holds

- `copies`: strided copies straight from the bucket into destination storages, in any order, no byte
  written twice;
- `tape`: the operators that are more than a copy (a cast into a derived buffer, `cat`, `w + 1`), in
  recorded order, to be run after the copies.

It also knows what it proved about the whole sync: `coverage` (which bytes are written, whatever was
there before).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from sglang_loader.common.layout import (
    BucketLayout,
    digest_of,
    encode_arrangements,
    encode_layout,
)
from sglang_loader.common.regions.arrangement import Arrangement
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.intervals import Interval
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.guard import Fingerprint
from sglang_loader.load_plan.trace import Space, TensorRef, leaves

LoadWeights: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""A model's own `load_weights`: takes `(name, tensor)` pairs."""


class PlanRefused(RuntimeError):
    """No plan can be made, or it did not prove itself: `reason` says why, in words for a log. The
    weights are as the model's own `load_weights` leaves them, so the caller goes on eagerly.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TapeStep:
    """One operator to run again. Tensors in `args` and `kwargs` are `TensorRef`s; `outputs` numbers
    the slots that its flattened outputs fill, and `releases` the slots nobody reads afterwards.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    releases: tuple[int, ...]

    def refs(self, space: Space) -> Iterator[TensorRef]:
        """The tensors of one space among the arguments."""
        for leaf in leaves((self.args, self.kwargs)):
            if isinstance(leaf, TensorRef) and leaf.space is space:
                yield leaf


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """How to load one bucket.

    `written` maps a destination storage to the byte ranges that this bucket surely overwrites;
    `live_in` to those that its tape reads as they were before. `slot_nbytes` is the storage size of
    each temporary, checked at replay. `host_reads` are destination ranges whose data reached
    Python: harmless only if no sync ever writes them.
    `changes_buffer`: the loader adds to its sources in place (Gemma's norms), and so does a replay:
    the buffer must not be the trainer's own memory.
    `source_nbytes`: size of the arranged buffer that the plan reads; None: it reads the bucket as
    its layout says.
    """

    layout: BucketLayout
    copies: tuple[StridedCopy, ...]
    tape: tuple[TapeStep, ...]
    constants: Mapping[int, torch.Tensor]
    slot_nbytes: Mapping[int, int]
    written: Mapping[int, tuple[Interval, ...]]
    live_in: Mapping[int, tuple[Interval, ...]]
    host_reads: tuple[tuple[str, int, Interval], ...]
    changes_buffer: bool
    num_traced_copies: int
    source_nbytes: int | None = None


Arranged: TypeAlias = tuple[Arrangement, BucketPlan]
"""What of a bucket is read, and the plan that reads it where nothing else has come."""


@dataclass(frozen=True)
class LoadPlan:
    """The plans of all buckets of a sync, in order, and what holds for the sync as a whole.

    Attributes:
        coverage: by storage (the first path that reaches it) the sorted byte ranges that a sync
            writes without needing what was there.
        arranged: by bucket; None: it comes as its layout says. (): every one does.
    """

    buckets: tuple[BucketPlan, ...]
    fingerprint: Fingerprint
    coverage: Mapping[str, tuple[Interval, ...]]
    destinations: Destinations = field(repr=False)
    arranged: tuple[Arranged | None, ...] = ()

    @cached_property
    def arrangements(self) -> bytes:
        """Of all buckets, as the trainer is told of them (see `layout`); empty: there are none."""
        if not any(self.arranged):
            return b""
        layouts = [digest_of(encode_layout(layout)) for layout in self.layouts]
        found = [each and each[0] for each in self.arranged]
        return encode_arrangements(list(zip(layouts, found, strict=True)))

    @cached_property
    def arrangements_digest(self) -> str:
        """Names `arrangements` on the wire; "": there are none."""
        return digest_of(self.arrangements) if self.arrangements else ""

    def arranged_nbytes(self, index: int) -> int | None:
        """Size of a bucket that comes arranged; None if it comes as it is, or there is none."""
        arranged = self.arranged[index] if index < len(self.arranged) else None
        return arranged and arranged[0].nbytes

    @property
    def changes_buffers(self) -> bool:
        """A replay changes some bucket that it reads."""
        return any(bucket.changes_buffer for bucket in self.buckets)

    @property
    def num_copies(self) -> int:
        """Strided copies of a sync."""
        return sum(len(bucket.copies) for bucket in self.buckets)

    @property
    def num_tape_steps(self) -> int:
        """Residual operators of a sync."""
        return sum(len(bucket.tape) for bucket in self.buckets)

    @property
    def num_traced_copies(self) -> int:
        """Copies that the model's loader made, before coalescing."""
        return sum(bucket.num_traced_copies for bucket in self.buckets)

    @property
    def layouts(self) -> tuple[BucketLayout, ...]:
        """The bucket layouts that this plan was compiled for."""
        return tuple(bucket.layout for bucket in self.buckets)
