"""Which syncs need no export: a world of one rank, real DTensors, memory that can be mapped."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from verl_sglang_sync.bucket_stream import BucketStream
from verl_sglang_sync.collective import SingleProcess
from verl_sglang_sync.reexport import Reexport
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.session_in_place import MAX_TRACES, UnexportedSource
from verl_sglang_sync.source import SourceWatch
from verl_sglang_sync.traced_export.known_sources import SourcesChanged
from verl_sglang_sync.weight_sync import Export

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Trainer:
    """FSDP2's state on one rank, and the syncs of it."""

    def __init__(self, recheck: int = 0) -> None:
        mesh = init_device_mesh("cpu", (1,))
        shapes = {"embed": (32, 8), "experts": (4, 6, 8), "norm": (8,)}
        self.state: dict[str, torch.Tensor] = {
            name: _mappable(distribute_tensor(torch.randn(shape), mesh, [Shard(0)]))
            for name, shape in shapes.items()
        }
        self.state["bias"] = torch.randn(3).share_memory_()
        self.change: Callable[[str, torch.Tensor], Any] = lambda name, tensor: [(name, tensor)]
        self.sources: Any = lambda: self.state
        self.stream = BucketStream(400)
        self.unexported = UnexportedSource(SingleProcess(), CPU, recheck_every_n_syncs=recheck)

    @property
    def export(self) -> Reexport:
        return Reexport(self._export, sources=self.sources)

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.state.items():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if name == "experts":
                for i, expert in enumerate(full):
                    yield from self.change(f"experts.{i}.gate", expert[:3])
                    yield from self.change(f"experts.{i}.up", expert[3:])
            else:
                yield from self.change(name, full)

    def full_sync(self) -> None:
        """Through the export; then learn."""
        watch = SourceWatch(CPU)
        report = SyncReport(mode="compiled", replica=0)
        for batch in self.stream.batches(Export(self.export), report):
            watch.see(batch)
        if self.unexported.can_learn(self.export):
            self.unexported.learn(self.export, watch.finish(), self.stream.cuts)

    def ready(self, num_cuts: int | None = None) -> bool:
        """Is the export left out, and rightly?"""
        if not self.unexported.is_due():
            return False
        try:
            for _ in self.unexported.confirm(self.export, self.stream.cuts[:num_cuts]):
                pass
        except SourcesChanged:
            assert self.unexported.has_failed()
            self.unexported.forget()
            return False
        assert not self.unexported.has_failed()
        return True

    def sent(self) -> dict[str, torch.Tensor]:
        """What an engine reads that knows the buckets alone."""
        report, read = SyncReport(mode="compiled", replica=0), {}
        for ready in self.unexported.buckets(self.export, report):
            assert ready.located is not None and ready.batch.tensors == []
            data = bytearray(ready.batch.bucket.layout.nbytes)
            for span in ready.located.spans:
                address = span.block.address + span.offset
                data[span.start : span.start + span.nbytes] = ctypes.string_at(address, span.nbytes)
            for block, member in ready.located.blocks:
                assert ready.holders is not None
                assert ready.holders[member].untyped_storage().data_ptr() == block.address
            for tensor in ready.batch.bucket.layout.tensors:
                part = data[tensor.offset : tensor.offset + tensor.nbytes]
                read[tensor.name] = torch.frombuffer(part, dtype=tensor.dtype).view(tensor.shape)
        assert report.num_unexported == report.num_in_place == report.num_buckets > 1
        assert report.num_tensors == len(read)
        return read

    def step(self) -> None:
        """As an optimizer: in place."""
        for parameter in self.state.values():
            _local(parameter).add_(1)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _mappable(parameter: DTensor) -> DTensor:
    _local(parameter).share_memory_()
    return parameter


def check_sent(trainer: Trainer) -> None:
    sent, exported = trainer.sent(), dict(trainer.export)
    assert sent.keys() == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(sent[name], tensor), name


def test_what_is_sent_is_what_the_export_would_give() -> None:
    trainer = Trainer()
    assert not trainer.ready()
    trainer.full_sync()
    for _ in range(3):
        trainer.step()
        assert trainer.ready()
        check_sent(trainer)


def test_parameters_are_let_go_of_after_the_sync() -> None:
    trainer = Trainer()
    trainer.full_sync()
    assert trainer.ready()
    trainer.sent()
    assert trainer.unexported._now
    trainer.unexported.rest()
    assert not trainer.unexported._now


def _other(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    local = local.contiguous().share_memory_()
    if isinstance(parameter, DTensor):
        return DTensor.from_local(local, parameter.device_mesh, [Shard(0)])
    return local


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "moved": lambda parameter: _other(parameter, _local(parameter).clone()),
    "cast": lambda parameter: _other(parameter, _local(parameter).bfloat16()),
    "shorter": lambda parameter: _other(parameter, _local(parameter)[:-1]),
}


@pytest.mark.parametrize("name", ["experts", "bias"])
@pytest.mark.parametrize("change", [*CHANGES, "gone"])
def test_parameters_that_changed_are_exported_and_traced_again(name: str, change: str) -> None:
    trainer = Trainer()
    trainer.full_sync()
    before = trainer.state.pop(name)  # alive: nothing new can be where it is
    if change != "gone":
        trainer.state[name] = CHANGES[change](before)
    assert not trainer.ready()
    for _ in range(2):  # one plans the buckets anew
        trainer.full_sync()
    assert trainer.ready()
    check_sent(trainer)


def test_parameters_that_move_again_and_again_are_exported() -> None:
    trainer = Trainer()
    seen = []
    for _ in range(MAX_TRACES + 2):
        trainer.full_sync()
        seen.append(trainer.ready())
        trainer.state["bias"] = trainer.state["bias"].clone().share_memory_()
        assert not trainer.ready()
    assert seen == [True] * MAX_TRACES + [False] * 2
    assert "moved" in (trainer.unexported.off or "")


def _swapped(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield {"experts.1.up": "experts.2.up", "experts.2.up": "experts.1.up"}.get(name, name), tensor


def test_a_trace_that_contradicts_what_was_found_is_not_used() -> None:
    """The export that was sent gave other tensors than the one that is traced."""
    trainer = Trainer()
    trainer.change = _swapped
    watch, report = SourceWatch(CPU), SyncReport(mode="compiled", replica=0)
    for batch in trainer.stream.batches(Export(trainer.export), report):
        watch.see(batch)
    trainer.change = lambda name, tensor: [(name, tensor)]
    trainer.unexported.learn(trainer.export, watch.finish(), trainer.stream.cuts)
    assert not trainer.ready()
    assert "was not found where its parameter is" in (trainer.unexported.off or "")


@pytest.mark.parametrize(
    "change",
    [
        lambda name, tensor: [(name, tensor.add_(0))],
        lambda name, tensor: [(name, tensor)] if float(tensor.sum()) < 1e9 else [],
    ],
    ids=["writes", "reads values"],
)
def test_an_export_that_computes_runs_at_every_sync(change: Any) -> None:
    trainer = Trainer()
    trainer.change = change
    trainer.full_sync()
    assert not trainer.ready()
    assert trainer.unexported.off is not None
    assert not trainer.unexported.can_learn(trainer.export)


def test_packed_weights_and_exports_without_sources_are_never_left_out() -> None:
    trainer = Trainer()
    trainer.state["bias"] = torch.randn(3)  # no other process can map it
    trainer.full_sync()
    assert not trainer.ready()
    trainer.sources = None
    assert not trainer.unexported.can_learn(trainer.export)
    assert not trainer.unexported.can_learn(list(trainer.export))


def test_other_buckets_or_lost_sources_end_it() -> None:
    for end in ("cuts", "sources"):
        trainer = Trainer()
        trainer.full_sync()
        if end == "sources":
            trainer.sources = None
            assert not trainer.ready()
        else:
            assert not trainer.ready(-1)
        trainer.sources = lambda state=trainer.state: state
        assert not trainer.ready(), "forgotten until it is traced again"


def test_every_nth_sync_goes_through_the_export() -> None:
    trainer = Trainer(recheck=3)
    trainer.full_sync()
    assert [trainer.ready() for _ in range(6)] == [True, True, False, True, True, False]
