"""Runs a model's `load_weights` without applying anything, and tells what it would have done.

    outcome = rehearse(model, [("model.norm.weight", torch.float32, (1024,)), ...])
    outcome.errors        # what it raised, by tensor
    outcome.uses          # what it did with each tensor
    outcome.written       # which bytes of the model it would have written

    with naming_refused(model, layout):     # an error of the load itself names the tensors
        model.load_weights(...)

Why run it: which names an SGLang model takes, in which shapes, cut and fused how, is written down
nowhere but in its `load_weights`. The sources take no memory (`sources`), writes are noted and not
made (`recorder`), and what the loader binds is unbound again (`model_state`). Afterwards the model
is compared with what it was, by identity and by content.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from sglang_loader.common.geometry import Region, region_runs
from sglang_loader.common.intervals import Interval, merge_runs
from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan.destinations import (
    Destinations,
    TensorEntry,
    collect_destinations,
    first_difference,
    iterate_tensors,
)
from sglang_loader.load_plan.tracer import inline_thread_pools
from sglang_loader.load_plan.verify import digest
from sglang_loader.rehearsal.model_state import ModelState
from sglang_loader.rehearsal.recorder import NotRehearsable, Recorder, Use
from sglang_loader.rehearsal.sources import Sources, Spec

logger = logging.getLogger(__name__)

MAX_SECONDS = 30.0
"""No further attempt begins after this time; what was found by then is reported."""


@dataclass(frozen=True)
class Refusal:
    """What `load_weights` raised at a tensor.

    Attributes:
        text: type and message.
        is_unknown: the name was looked up in vain.
        together: all tensors that it had in hand; any of them may be to blame.
    """

    text: str
    is_unknown: bool
    together: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """What `load_weights` would do.

    Attributes:
        errors: by tensor; the others were loaded without these.
        failure: what it raised at no tensor in particular; None if it came to its end.
        uses: of each tensor that was touched at all.
        written: bytes of the model, by storage.
        destinations: of the model.
    """

    errors: Mapping[str, Refusal]
    failure: str | None
    uses: Mapping[str, Use]
    written: Mapping[int, Sequence[Interval]]
    destinations: Destinations


def rehearse(model: Any, specs: Sequence[Spec]) -> Rehearsal:
    """Have `model.load_weights` load stand-ins for `specs` and apply nothing.

    Args:
        model: an SGLang model whose weights are in memory.
        specs: what the trainer is about to send, in its order.

    Raises:
        NotRehearsable: it cannot be told what the loader would do, or it changed the model all the
            same; the message says why.
    """
    try:
        before = collect_destinations(model)
        sources = Sources(specs)
    except (ValueError, OSError) as error:
        raise NotRehearsable(str(error)) from error
    if before.opaque:
        raise NotRehearsable(f"{before.opaque[0]} is not a plain strided tensor")
    content, state = digest(before), ModelState(model)
    collects = gc.isenabled()
    gc.disable()  # as for a trace: a million small objects and no cycles
    try:
        return _attempts(model, sources, before, state)
    finally:
        state.restore()
        if collects:
            gc.enable()
        _check_unchanged(model, before, content)


@contextmanager
def naming_refused(model: Any, layout: BucketLayout) -> Iterator[None]:
    """Have an error of loading a bucket say which of its tensors `load_weights` refuses, and why.

    What it raises itself is often an assertion about two shapes, of one tensor of several.
    """
    try:
        yield
    except Exception as error:
        try:
            refused = rehearse(model, [(t.name, t.dtype, t.shape) for t in layout.tensors]).errors
        except Exception as reason:
            logger.warning("which tensors were refused is not known: %r", reason)
            refused = {}
        shapes = {tensor.name: list(tensor.shape) for tensor in layout.tensors}
        for name, refusal in refused.items():
            error.add_note(f"load_weights refuses {name} {shapes[name]} ({refusal.text})")
        raise


def _attempts(model: Any, sources: Sources, before: Destinations, state: ModelState) -> Rehearsal:
    """Load again and again without what was refused, until one call takes all the rest."""
    errors: dict[str, Refusal] = {}
    deadline = time.monotonic() + MAX_SECONDS
    while True:
        attempt = _Attempt(model, sources, before)
        attempt.run(errors)
        state.restore()
        if not attempt.found or attempt.failure or time.monotonic() > deadline:
            return attempt.outcome(errors)


class _Attempt:
    """One way through all sources, in one call of `load_weights` unless it raises.

    Attributes:
        found: it refused a tensor that was not refused before.
        failure: it raised, and no tensor is to blame.
    """

    def __init__(self, model: Any, sources: Sources, before: Destinations) -> None:
        self.found = False
        self.failure: str | None = None
        self._model = model
        self._sources = sources
        self._before = before
        self._recorder = Recorder(sources, before)
        self._last: str | None = None
        self._is_exhausted = False

    def run(self, errors: dict[str, Refusal]) -> None:
        """Load everything but `errors`; add what is refused."""
        remaining = self._feed(errors)
        while self.failure is None:
            error = self._load(remaining)
            if error is None:
                break
            names = self._blame(error)
            if not names or names & errors.keys():
                self.failure = _text(error)
            else:
                is_unknown = isinstance(error, KeyError | AttributeError)
                refusal = Refusal(_text(error), is_unknown, tuple(sorted(names)))
                errors.update(dict.fromkeys(names, refusal))
                self.found = True
            if self._is_exhausted:
                break
        self._note_bindings()

    def outcome(self, errors: dict[str, Refusal]) -> Rehearsal:
        """What this attempt saw."""
        names = [tensor.name for tensor in self._sources.tensors]
        return Rehearsal(
            errors=errors,
            failure=self.failure,
            uses={names[index]: use for index, use in self._recorder.uses.items()},
            written={
                storage: merge_runs(map(region_runs, set(regions)))
                for storage, regions in self._recorder.written.items()
            },
            destinations=self._before,
        )

    def _feed(self, errors: Mapping[str, Refusal]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, view in self._sources.views:
            if name not in errors:
                self._last = name
                yield name, view
        self._is_exhausted = True

    def _load(self, remaining: Iterator[tuple[str, torch.Tensor]]) -> Exception | None:
        recorder = self._recorder
        try:
            with inline_thread_pools(raise_at_once=True), recorder:
                self._model.load_weights(remaining)
        except Exception as error:
            if recorder.problem is None:
                return error
        if recorder.problem is not None:
            raise NotRehearsable(recorder.problem)
        return None

    def _blame(self, error: Exception) -> set[str]:
        """The tensors at which it was raised: those in the hands of the innermost function that
        has any, or the one that was given out last.
        """
        frames = list(_frames(error.__traceback__))
        for frame in reversed(frames[2:]):  # without this module's and `load_weights` itself
            tensors = [value for value in frame.values() if isinstance(value, torch.Tensor)]
            found = {i for tensor in tensors for i in self._recorder.origins(tensor)}
            if found:
                return {self._sources.tensors[i].name for i in found}
        return {self._last} if self._last is not None and not self._is_exhausted else set()

    def _note_bindings(self) -> None:
        """Tensors that the loader put into the model, instead of copying into it."""
        known = {(s.data_ptr, s.nbytes) for s in self._before.storages}
        places = {t.name: t for t in self._before.tensors}
        for place in iterate_tensors(self._model):
            if place.tensor.device.type == "meta":
                continue
            raw = place.tensor.untyped_storage()
            if (raw.data_ptr(), raw.nbytes()) in known:
                continue
            if self._recorder.note_bound(place.tensor) and place.name in places:
                was = places[place.name]
                self._recorder.written[was.storage].append(region_of(was))


def region_of(tensor: TensorEntry) -> Region:
    """Where a tensor of the model lies in its storage."""
    return Region(tensor.offset, tensor.shape, tensor.stride, tensor.dtype.itemsize)


def _frames(trace: TracebackType | None) -> Iterator[dict[str, Any]]:
    while trace is not None:
        yield trace.tb_frame.f_locals
        trace = trace.tb_next


def _text(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _check_unchanged(model: Any, before: Destinations, content: list[tuple[int, ...]]) -> None:
    moved = first_difference(before, collect_destinations(model))
    if moved is not None:
        raise NotRehearsable(f"load_weights cannot be undone: {moved}")
    if digest(before) != content:
        raise NotRehearsable("load_weights writes in a way that could not be kept from happening")
