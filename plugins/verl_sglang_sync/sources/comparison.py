"""The proof of a trace: a rank's shards hold what the full export gives, bit for bit.

The export that is compared is the one that the engines load: while they load a bucket, the trainer
waits for them anyway, and need not export a second time.

    comparison = source_map.begin_comparison(export)    # collective; before the first bucket
    comparison.add(batch.named)                   # each bucket of it, on its way to the engines
    problem = comparison.finish()                 # of this rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from sglang_loader.common.copies.strided import copy_views
from sglang_loader.common.ranks import Reason, attempt
from sglang_loader.common.regions.compose import shard_copies
from sglang_loader.common.regions.geometry import StridedCopy
from verl_sglang_sync.ranks import own_rank
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport
from verl_sglang_sync.sources.snapshot import memory_of

MAX_AHEAD_BYTES = 1 << 30
"""Of exported tensors that wait for the device to compare them: their memory is in use so long."""


@dataclass(eq=False)
class Comparison:
    """Compares an export with this rank's shards, bucket by bucket; waits for the device rarely.

    Attributes:
        traced: what the export's tensors are; None: it could not be traced, for this `problem`.
        now: the parameters as they are, by name; kept until `finish`.
    """

    traced: TracedExport | None
    now: Mapping[str, torch.Tensor]
    device: torch.device
    problem: Reason | None = None

    def __post_init__(self) -> None:
        self._shards: dict[int, torch.Tensor] = {}
        self._seen: set[str] = set()
        self._differences: list[tuple[str, torch.Tensor]] = []
        self._ahead_bytes = 0

    def add(self, exported: Iterable[NamedTensor]) -> None:
        """Compare tensors; never raises: the other ranks need this one's in the export."""
        if self.problem is None:
            _, reason = attempt(lambda: self._add(exported), NotTraceable)
            self.problem = self.problem or reason

    def finish(self) -> Reason | None:
        """The first difference on this rank, in words, or what went wrong, or None."""
        self._wait()
        self.now, self._shards = {}, {}
        if self.problem is None and self.traced is not None:
            num_traced = len(self.traced.tensors)
            if self._seen != self.traced.tensors.keys():
                text = f"{len(self._seen)} tensors were exported, {num_traced} traced"
                self.problem = Reason(text, is_final=True)
        return self.problem

    def _add(self, named: Iterable[NamedTensor]) -> None:
        for name, exported in named:
            self._seen.add(name)
            self._differences += [(name, answer) for answer in self._compared(name, exported)]
            self._ahead_bytes += exported.nbytes
            if self._ahead_bytes > MAX_AHEAD_BYTES:
                self._wait()

    def _compared(self, name: str, exported: torch.Tensor) -> list[torch.Tensor]:
        """Does it differ from its parameter? A bool on the device for each part on this rank."""
        assert self.traced is not None, "else there is a problem"
        found = self.traced.tensors.get(name)
        if found is None or (found.dtype, found.shape) != (exported.dtype, tuple(exported.shape)):
            raise NotTraceable(f"{name} was not traced, or not with this shape and dtype")
        if not exported.numel():
            return []
        flat = exported.detach().contiguous().view(-1).view(torch.uint8)
        parameter = found.origin.parameter
        owners = self.traced.owners[parameter]
        everything = StridedCopy(0, 0, int(flat.storage_offset()), (), flat.numel())
        answers = []
        for shard, copy in shard_copies(found.origin.bytes, owners.starts, everything):
            if owners.owner_of(shard, own_rank()) != own_rank():
                continue
            if (own := self._shards.get(parameter)) is None:
                source = self.traced.parameters[parameter].source
                own = self._shards[parameter] = memory_of(self.now[source])
            whole, part = copy_views(copy, own, flat)
            if part.data_ptr() != whole.data_ptr():
                answers.append((part != whole).any())
        return answers

    def _wait(self) -> None:
        """Wait for the device's answers so far, and note the first difference."""
        answers, self._differences, self._ahead_bytes = self._differences, [], 0
        if not answers or self.problem is not None:
            return
        differ, self.problem = attempt(
            lambda: torch.stack([answer.to(self.device) for _, answer in answers]).tolist()
        )
        if differ is not None and True in differ:
            name, _ = answers[differ.index(True)]
            text = f"{name} is exported with other bytes than its parameter has"
            self.problem = Reason(text, is_final=True)
