"""The proof of a pull: a rank's shards hold what the full export gives, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_loader.common.copies import copy_views
from sglang_loader.common.regions.compose import shard_copies
from sglang_loader.common.regions.geometry import StridedCopy
from verl_sglang_sync.collective import own_rank, result_or_reason
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport

MAX_AHEAD_BYTES = 1 << 30
"""Of exported tensors that wait for the device to compare them: their memory is in use so long."""


class Comparison:
    """Compares an export with this rank's shards, tensor by tensor; waits for the device rarely.

    Args:
        shards: this rank's, flat bytes by parameter.
    """

    def __init__(
        self, traced: TracedExport, shards: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._traced = traced
        self._shards = shards
        self._device = device
        self._seen: set[str] = set()
        self._problem: str | None = None
        self._answers: list[tuple[str, torch.Tensor]] = []
        self._num_ahead = 0

    def add(self, name: str, exported: torch.Tensor) -> None:
        """Compare a tensor; never raises: the other ranks need this one's in the export."""
        self._seen.add(name)
        answers, reason = result_or_reason(lambda: self._differs(name, exported), NotTraceable)
        self._problem = self._problem or reason
        self._answers += [(name, answer) for answer in answers or []]
        self._num_ahead += exported.nbytes
        if self._num_ahead > MAX_AHEAD_BYTES:
            self._wait()

    def finish(self) -> str | None:
        """The first difference on this rank, in words, or what went wrong; None if nothing."""
        self._wait()
        if self._problem is None and self._seen != self._traced.tensors.keys():
            return f"{len(self._seen)} tensors were exported, {len(self._traced.tensors)} traced"
        return self._problem

    def _differs(self, name: str, exported: torch.Tensor) -> list[torch.Tensor]:
        """Is it something else than was traced? A bool for each part of it, not waited for."""
        found = self._traced.tensors.get(name)
        if found is None or (found.dtype, found.shape) != (exported.dtype, tuple(exported.shape)):
            raise NotTraceable(f"{name} was not traced as it is exported")
        if not exported.numel():
            return []
        flat = exported.detach().contiguous().view(-1).view(torch.uint8)
        parameter = found.origin.parameter
        own, owners = self._shards[parameter], self._traced.owners[parameter]
        everything = StridedCopy(0, 0, int(flat.storage_offset()), (), flat.numel())
        answers = []
        for shard, copy in shard_copies(found.origin.bytes, owners.starts, everything):
            if owners.owner_of(shard, own_rank()) != own_rank():
                continue
            whole, part = copy_views(copy, own, flat)
            if part.data_ptr() != whole.data_ptr():
                answers.append((part != whole).any())
        return answers

    def _wait(self) -> None:
        """Have the device's answers so far."""
        answers, self._answers, self._num_ahead = self._answers, [], 0
        if not answers or self._problem is not None:
            return
        differ, self._problem = result_or_reason(
            lambda: torch.stack([answer.to(self._device) for _, answer in answers]).tolist()
        )
        if differ is not None and True in differ:
            name, _ = answers[differ.index(True)]
            self._problem = f"{name} is exported with other bytes than its parameter has"
