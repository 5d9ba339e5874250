"""The check of a trace: compares a rank's shards with the full export, bit for bit.

    comparison = source_map.begin_comparison(export)    # collective, before the first bucket
    comparison = source_map.compare_while_exported(export)   # the same, later if possible
    comparison.add(batch.named)                   # for each bucket, as the engines load it
    problem = comparison.finish()                 # of this rank

The export that is compared is the one that the engines load. So the trainer need not export twice,
and compares a bucket while it waits for the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import compress

import torch

from sglang_loader.common.copies.strided import copy_views
from sglang_loader.common.ranks import Reason, attempt
from sglang_loader.common.regions.compose import shard_copies
from sglang_loader.common.regions.geometry import StridedCopy
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.snapshot import Sources, SourcesChanged, memory_of
from verl_sglang_sync.trainer_ranks import own_rank

MAX_PENDING_BYTES = 1 << 29
"""Bytes of exported tensors after which results are read back. The host waits for the results
before these, so the device has twice as many bytes to compare at most. They occupy memory."""


@dataclass(frozen=True)
class _Results:
    """Results that the device has begun to copy to the host.

    Attributes:
        names: of the tensors, one for each result.
        differ: bools in the host's memory.
        copied: is recorded after the copy. None if the copy has been made.
    """

    names: list[str]
    differ: torch.Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def begin(cls, differences: list[tuple[str, torch.Tensor]], device: torch.device) -> _Results:
        """Begin to copy the results, given bools on the device by name."""
        bools = torch.stack([differs.to(device) for _, differs in differences])
        names, on_gpu = [name for name, _ in differences], device.type == "cuda"
        differ, copied = bools.to("cpu", non_blocking=on_gpu), None
        if on_gpu:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))
        return cls(names, differ, copied)

    def first(self) -> str | None:
        """Wait for the copy, and return the name of the first tensor that differs, or None."""
        if self.copied is not None:
            self.copied.synchronize()
        return next(compress(self.names, self.differ.tolist()), None)


@dataclass(eq=False)
class Comparison:
    """A comparison of an export with this rank's shards, bucket by bucket.

    Attributes:
        traced: the trace of the export, or None if it has not been traced, or could not be.
        sources: returns the trainer's parameters by name. FSDP1's are elsewhere once its export has
            begun, so they are listed with the first tensor, and dropped by `finish`.
        problem: the reason why the comparison failed, or None so far.
        trace: traces the export when the first tensors are added. Not needed with `traced`.
        names: of all tensors that were added.
    """

    traced: TracedExport | None
    sources: Sources
    device: torch.device
    problem: Reason | None = None
    trace: Callable[[], TracedExport] | None = None

    def __post_init__(self) -> None:
        self._parameters: Mapping[str, torch.Tensor] | None = None
        self._shards: dict[int, torch.Tensor] = {}  # by number of the parameter
        self.names: set[str] = set()
        self._differences: list[tuple[str, torch.Tensor]] = []  # bools on the device
        self._pending_bytes = 0
        self._results: _Results | None = None
        self._rank = own_rank()

    def add(self, exported: Iterable[NamedTensor]) -> None:
        """Compare exported tensors. An error is kept as the `problem`, and never raised."""
        # The other ranks need this rank in the collectives of the export.
        if self.problem is None:
            work = partial(self._add, exported)
            _, reason = attempt(work, NotTraceable, passing=(SourcesChanged,))
            self.problem = self.problem or reason

    def finish(self) -> Reason | None:
        """Return the first difference on this rank, or the error, or None if all is equal."""
        self._read_back()
        self._read_back()  # the results of what was pending
        self._parameters, self._shards = None, {}
        if self.problem is None and self.traced is not None:
            others = self.traced.others
            own = {name for name in self.names if name not in others}
            if own != self.traced.tensors.keys():
                text = f"{len(own)} tensors were exported, {len(self.traced.tensors)} traced"
                self.problem = Reason(text, is_final=True)
        return self.problem

    def _add(self, named: Iterable[NamedTensor]) -> None:
        if self.traced is None and self.trace is not None:
            self.traced = self.trace()
        if self._parameters is None:
            self._parameters = self.sources()
        for name, exported in named:
            self.names.add(name)
            self._differences += [(name, differs) for differs in self._compare(name, exported)]
            self._pending_bytes += exported.nbytes
            if self._pending_bytes > MAX_PENDING_BYTES:
                self._read_back()

    def _compare(self, name: str, exported: torch.Tensor) -> list[torch.Tensor]:
        """Compare a tensor with its parameter.

        Returns:
            For each part of the tensor on this rank, a bool on the device: True if it differs.

        Raises:
            NotTraceable: the trace has no tensor of this name, shape and dtype.
        """
        assert self.traced is not None, "without a trace there is a problem"
        if name in self.traced.others:
            return []
        traced = self.traced.tensors.get(name)
        if traced is None or (traced.dtype, traced.shape) != (
            exported.dtype,
            tuple(exported.shape),
        ):
            raise NotTraceable(f"{name} was not traced, or not with this shape and dtype")
        if not exported.numel():
            return []
        flat = exported.detach().contiguous().view(-1).view(torch.uint8)
        differences, start = [], int(flat.storage_offset())
        for origin in traced.origins:
            parameter = origin.parameter
            owners = self.traced.parameters[parameter].owners
            everything = StridedCopy(0, 0, start, (), origin.bytes.nbytes)
            start += origin.bytes.nbytes
            for shard, copy in shard_copies(origin.bytes, owners.starts, everything):
                # A rank is nearest to itself, so each rank compares all copies that it holds.
                if owners.owner_of(shard, self._rank) != self._rank:
                    continue
                if (memory := self._shards.get(parameter)) is None:
                    source = self.traced.parameters[parameter].source
                    assert self._parameters is not None, "listed by the caller"
                    memory = self._shards[parameter] = memory_of(self._parameters[source])
                whole, part = copy_views(copy, memory, flat)
                # On one rank an export may return the parameter's own memory.
                if part.data_ptr() != whole.data_ptr():
                    differences.append((part != whole).any())
        return differences

    def _read_back(self) -> None:
        """Begin to copy the pending results, and wait for those before. Keep the first problem."""
        pending, self._differences, self._pending_bytes = self._differences, [], 0
        results, self._results = self._results, None
        if self.problem is not None:
            return

        # Many results in one copy, and the device has work while the host waits.
        if pending:
            begin = partial(_Results.begin, pending, self.device)
            self._results, self.problem = attempt(begin)
        if results is None:
            return
        name, failed = attempt(results.first)
        if name is not None:
            text = f"{name} is exported with other bytes than its parameter has"
            self.problem = Reason(text, is_final=True)
        self.problem = self.problem or failed
