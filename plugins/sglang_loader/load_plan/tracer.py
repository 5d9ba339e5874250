"""Trace of what a model's own `load_weights` does with the bytes of one bucket.

A `TorchDispatchMode` receives every operator below autograd, also inside loaders that were not
written for it. Each recorded step refers to memory, not to Python objects. A `TensorRef` holds a
place in one of four spaces: the bucket, a destination storage, a temporary made during the trace,
or a constant that existed before.

What the mode cannot see is named or prevented:

- Some loaders put CPU tensors on a thread pool (SGLang's DeepSeek loader). `inline_thread_pools`
  runs what this thread submits at once.
- The host may read tensor data. `equal`, `bool` and the like are operators with a tag. `host_reads`
  reports the other reads.
- A loader may keep memory for a later call, in a place that the model does not reach. Its use would
  not be replayed. Such memory is still alive after the load, and the plan is refused.
- No mode sees threads, kernels and C++. `verify.check_bucket` finds their writes. A decision by
  data that they read is not found.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sglang_loader.common.copies.strided import region_of
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.op_traits import OpTraits, leaves, map_leaves, read_traits
from sglang_loader.load_plan.destinations import (
    Destinations,
    collect_destinations,
    first_difference,
)
from sglang_loader.load_plan.host_reads import HostReadWatch
from sglang_loader.load_plan.plan import LoadWeights, PlanRefused
from sglang_loader.load_plan.trace import Space, Step, TensorRef, TracedBucket

_INDEX_OPS = frozenset({"aten::index", "aten::_unsafe_index"})


def trace_bucket(
    model: nn.Module,
    load_weights: LoadWeights,
    layout: BucketLayout,
    buffer: torch.Tensor,
    earlier: Destinations | None = None,
) -> TracedBucket:
    """Load one bucket under tracing. Takes a scratch copy of the bucket.

    If the load rebinds tensors, the bucket is loaded and traced once more.

    Args:
        buffer: uint8 of shape `[layout.nbytes]` or more.
        earlier: the model's storages after the last bucket.

    Raises:
        PlanRefused: the load cannot be traced. The bucket is loaded all the same.
        ValueError: the buffer does not fit the layout.
        Exception: what `load_weights` raises.
    """
    source = buffer[: layout.nbytes]
    # A loader of the `bind_or_assign` kind binds new memory in its first call and copies into that
    # memory in later calls. Only the later calls can be replayed.
    for is_last in (False, True):
        try:
            # As a rule nothing was rebound since the last bucket. One walk over the model, after
            # the load, is enough in that case.
            initial = earlier if earlier and not is_last else _collect(model, earlier)
            traced, moved = _trace_once(model, load_weights, layout, source, initial, earlier)
        except Exception as error:
            load_weights(iter(layout.views(source.clone())))
            if isinstance(error, PlanRefused):
                raise
            raise PlanRefused(f"load_weights failed under tracing: {error!r}") from error
        if moved is None:
            break
        if is_last:
            traced.problems.insert(0, f"load_weights rebinds tensors: {moved}")
    return traced


def _trace_once(
    model: nn.Module,
    load_weights: LoadWeights,
    layout: BucketLayout,
    source: torch.Tensor,
    initial: Destinations,
    earlier: Destinations | None,
) -> tuple[TracedBucket, str | None]:
    """Load and trace a bucket. Return the trace, and a text about a rebound tensor, or None."""
    traced = TracedBucket(layout, initial)
    temporary = _record(traced, load_weights, source)
    moved = first_difference(initial, _collect(model, initial))
    if moved is None and earlier is not None:  # a tensor may be rebound since the last bucket
        moved = first_difference(earlier, initial, new_allowed=True)
    # A later call may use the kept tensor, which a replay would not repeat.
    if moved is None and any(map(_is_kept, temporary)):
        traced.problems.append("load_weights keeps a tensor that no module of the model has")
    return traced, moved


def _record(
    traced: TracedBucket, load_weights: LoadWeights, source: torch.Tensor
) -> list[StorageWeakRef]:
    """Load a copy of the bucket, and return the memory that should be free after the load.

    That is the memory of the copy, and of temporaries made from the copy or from the model.
    """
    scratch = source.clone()  # loaders may change their sources in place
    views = traced.layout.views(scratch)  # made here, outside of the recorder
    recorder = _DispatchRecorder(traced, scratch)
    watch = HostReadWatch(recorder.note_host_read)
    with inline_thread_pools(), recorder, watch.watching():
        load_weights(iter(views))
    # A later use of the number would be a read that nothing sees.
    if watch.has_live_scalars:
        raise PlanRefused("load_weights keeps a number that it has read from a tensor (item)")
    made = [ref for number, ref in recorder.temporaries.items() if traced.origins.has(number)]
    return [StorageWeakRef(scratch.untyped_storage()), *made]


def _is_kept(memory: StorageWeakRef) -> bool:
    """Return True if a Python object still holds the memory, apart from a reference cycle."""
    if not memory.expired():
        gc.collect(0)
    return not memory.expired()


def _collect(model: nn.Module, earlier: Destinations | None) -> Destinations:
    try:
        destinations = collect_destinations(model, earlier)
    except ValueError as error:
        raise PlanRefused(str(error)) from error
    if destinations.opaque:
        raise PlanRefused(f"{destinations.opaque[0]} is not a plain strided tensor")
    return destinations


_patch_lock = threading.RLock()
"""Threads that trace at the same time might undo their patches in the wrong order."""


@contextmanager
def inline_thread_pools() -> Iterator[None]:
    """Run tasks that this thread submits to any `ThreadPoolExecutor` at once, in this thread.

    Submissions of other threads are untouched.
    """
    # Dispatch modes are thread-local, and SGLang's DeepSeek-type loaders submit the loading of CPU
    # tensors (`model_loader/utils.py: maybe_executor_submit`).
    tracing_thread = threading.get_ident()

    def run_inline(self: ThreadPoolExecutor, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.get_ident() != tracing_thread:
            return submit(self, fn, *args, **kwargs)
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    # Submissions of other threads go to the original method.
    with _patch_lock:
        submit = ThreadPoolExecutor.submit
        with mock.patch.object(ThreadPoolExecutor, "submit", run_inline):
            yield


class _DispatchRecorder(TorchDispatchMode):
    """A recorder that adds dispatched operators to a trace as steps.

    Attributes:
        trace: the trace.
        temporaries: by number, weak references to the memory of temporaries.
    """

    def __init__(self, trace: TracedBucket, bucket: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self._bucket_start = bucket.data_ptr()
        self._bucket_stop = self._bucket_start + bucket.numel()
        self._places: dict[int, tuple[Space, int, int]] = {}
        # Weak: the memory is freed as in an eager load. Yet no other storage object can take the
        # same identity during the trace.
        self.temporaries: dict[int, StorageWeakRef] = {}
        self._held: list[object] = []
        self._numbers = count()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        traits = read_traits(func)
        if traits.view:  # a view has its base's storage, by which it is found later
            return func(*args, **kwargs)
        if traits.problem is not None:
            self.trace.problems.append(traits.problem)
        # References are taken before the call, which may change a tensor's geometry.
        with torch._C.DisableTorchFunction():
            ref_args, ref_kwargs = map_leaves(self._ref_or_value, (args, kwargs))
            self._note_host_reads(traits, args, kwargs)
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._append(func, traits, ref_args, ref_kwargs, out)
        return out

    def note_host_read(self, method: str, tensor: torch.Tensor) -> None:
        """Record that Python read the data of `tensor`, by this method."""
        with _disable_current_modes():  # reads without an operator come while the mode is active
            self.trace.host_reads.append((method, self._ref(tensor)))

    def _append(
        self, op: Any, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        written = traits.written_in(args, kwargs)
        writes = [ref for ref in leaves(written) if isinstance(ref, TensorRef)]
        # A result in new memory is a temporary, which the step writes, too.
        for made in leaves(out):
            if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in self._places:
                ref = self._ref(made, Space.TEMPORARY)
                if ref.space is Space.TEMPORARY:
                    writes.append(ref)
        if not writes:
            return
        reads = [ref for ref in leaves((args, kwargs)) if isinstance(ref, TensorRef)]
        if traits.overwrites:  # the target's old content does not count as read
            reads = [ref for ref in reads if not any(ref is target for target in writes)]
        origins = self.trace.origins.follow(reads, writes)
        self.trace.steps.append(Step(op, traits, tuple(reads), tuple(writes), origins))

    def _note_host_reads(
        self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if traits.reads_host or (traits.dynamic_shape and traits.name not in _INDEX_OPS):
            seen = leaves((args, kwargs))
        elif traits.dynamic_shape:  # integer indices give a fixed shape, masks do not
            masks = (torch.bool, torch.uint8)
            seen = [t for t in args[1] if isinstance(t, torch.Tensor) and t.dtype in masks]
        else:
            return
        for tensor in seen:
            if isinstance(tensor, torch.Tensor):
                self.note_host_read(traits.name, tensor)

    def _ref_or_value(self, value: Any) -> Any:
        return self._ref(value) if isinstance(value, torch.Tensor) else value

    def _ref(self, tensor: torch.Tensor, unknown: Space = Space.CONSTANT) -> TensorRef:
        """Return the place of a tensor.

        Args:
            unknown: the space of memory that is neither the bucket's nor a destination, and is new
                here.
        """
        storage = tensor.untyped_storage()
        place = self._places.get(storage._cdata)
        if place is None:  # memory that appears for the first time
            place = self._find(storage) or (unknown, next(self._numbers), 0)
            self._places[storage._cdata] = place
            if place[0] is Space.TEMPORARY:
                self.temporaries[place[1]] = StorageWeakRef(storage)
            else:  # held, so that no other storage can take the same identity
                self._held.append(storage)
            is_plain = tensor.layout == torch.strided and tensor.device.type != "meta"
            if place[0] is Space.CONSTANT and not is_plain:
                self.trace.problems.append(f"a {tensor.layout} tensor on {tensor.device} was used")
        space, index, delta = place
        if tensor.dtype.is_complex and (tensor.is_conj() or tensor.is_neg()):
            self.trace.problems.append("a lazily conjugated tensor was used")
        region = region_of(tensor)
        if delta:
            region = replace(region, offset=region.offset + delta)
        return TensorRef(space, index, tensor.dtype, region)

    def _find(self, storage: torch.UntypedStorage) -> tuple[Space, int, int] | None:
        """Return the bucket or destination at this storage's address, and the offset there."""
        address = storage.data_ptr()
        if address == 0 or storage.nbytes() == 0:
            return None
        destination = self.trace.destinations.find(address)
        if destination is not None:
            return Space.DESTINATION, destination[0], destination[1]
        overlaps = address < self._bucket_stop and self._bucket_start < address + storage.nbytes()
        return (Space.BUCKET, 0, address - self._bucket_start) if overlaps else None
