"""What each rank does in the tests of pulled parameters: real FSDP2, verl's own export, on gloo."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from sglang_loader.common.bucket_source import BucketSource, Piece
from sglang_loader.common.shared_memory import map_buffer
from unit.exchange_ranks import CPU, export_of, sharded
from unit.trainer_ranks import trainer_group

BUCKET_BYTES = 20 << 10


@dataclass
class Seen:
    """What a rank saw.

    Attributes:
        routes: what each sync was: "export" or "pull".
        wrong: tensors that an engine on this rank would have read wrongly, by pulled sync.
        num_gathers: calls of `full_tensor` in pulled syncs.
        recoveries: after syncs that failed.
        off: why nothing is pulled.
    """

    routes: list[str] = field(default_factory=list)
    wrong: list[list[str]] = field(default_factory=list)
    num_gathers: int = 0
    recoveries: list[str] = field(default_factory=list)
    off: str | None = None


class Rank:
    """The syncs of one model on this rank, and an engine that maps what it is told to."""

    def __init__(self, kind: str, *, is_shared: bool = True, recheck: int = 0) -> None:
        from verl_sglang_sync.routes.pull.route import Pull
        from verl_sglang_sync.sources.bucket_stream import BucketStream
        from verl_sglang_sync.sources.source_map import SourceMap

        self.model = sharded(kind)
        if is_shared:
            share(self.model)
        self.group = trainer_group(2)[0]
        self.export: Any = export_of(self.model)
        self.stream = BucketStream(BUCKET_BYTES)
        self.num_handles = 0
        self.pull = Pull(
            self.group,
            CPU,
            SourceMap(self.group, CPU),
            self.stream,
            is_wanted=True,
            record=self._count,
            recheck_every_n_syncs=recheck,
        )
        self.mapped: dict[str, torch.Tensor] = {}
        self.seen = Seen()

    def _count(self, handle: object) -> None:
        self.num_handles += 1

    def sync(self, *, may_read: bool = True) -> None:
        """One sync as a transport would make it, again where a pull does not hold."""
        from torch.distributed.tensor import DTensor

        from verl_sglang_sync.report import SyncReport
        from verl_sglang_sync.routes.route import Recovery

        if self.pull.choose(self.export, SyncReport(mode="compiled", replica=0)) is None:
            self._export(may_read)
            return
        cause = None
        self.group.all_gather(None)  # all have written what they export
        try:
            with mock.patch.object(DTensor, "full_tensor", autospec=True) as gather:
                self._read()
            self.seen.num_gathers += gather.call_count
        except Exception as error:
            cause = error
        if all(each is None for each in self.group.all_gather(cause and repr(cause))):
            self.pull.end()
            self.seen.routes.append("pull")
            return
        recovery = self.pull.recover(cause, self.export)
        self.seen.recoveries.append(recovery.name)
        if recovery is Recovery.AGAIN:
            self.sync()
        elif recovery is Recovery.EXPORT:
            self._export(may_read)

    def _export(self, may_read: bool) -> None:
        from verl_sglang_sync.report import SyncReport
        from verl_sglang_sync.sources.export import Export

        for _ in self.stream.batches(Export(self.export), SyncReport(mode="compiled", replica=0)):
            pass
        self.seen.routes.append("export")
        if self.pull.can_learn(self.export):
            self.pull.learn(self.export, loaded(may_read))
        self.seen.off = self.pull.off

    def _read(self) -> None:
        """As an engine: from the mapped blocks, every tensor of every bucket."""
        from verl_sglang_sync.report import SyncReport

        report, read = SyncReport(mode="compiled", replica=0), {}
        slots, self.keeps = [], self.pull.keeps_mappings
        for block in self.pull.blocks:
            if block.name not in self.mapped:
                assert block.handle is not None
                self.mapped[block.name] = map_buffer(block.handle, CPU)
            slots.append(self.mapped[block.name])
        for pulled in self.pull.buckets(report):
            layout = pulled.bucket.layout
            assert not any(piece.shards for piece in pulled.pieces)
            pieces = [
                Piece(p.start, slots[p.slot][p.offset : p.offset + p.nbytes]) for p in pulled.pieces
            ]
            packed = BucketSource(pieces).packed(layout)
            read.update({name: tensor.clone() for name, tensor in layout.views(packed)})
        for _ in self.pull.confirm(self.export, self.stream.cuts):
            pass
        self.read = read
        if not self.keeps:
            self.mapped.clear()

    def compare(self) -> None:
        """What was pulled last with the full export."""
        full = dict(self.export)
        assert full.keys() == self.read.keys()
        assert any(tensor.any() for tensor in full.values())
        pairs = [(name, self.read[name], full[name]) for name in full]
        self.seen.wrong.append([name for name, have, want in pairs if not torch.equal(have, want)])

    def step(self) -> None:
        """As an optimizer: in place, another value for each element."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local()
                local.add_(torch.arange(local.numel(), dtype=local.dtype).view(local.shape) + 1)


def loaded(may_read: bool) -> Any:
    """What an engine rank says that has loaded an exported sync."""
    from sglang_loader.common.session.messages import Loaded

    return Loaded(
        num_replayed=0,
        num_eager=1,
        reason=None,
        may_read_in_place=may_read,
        arrangements=None,
        seconds={},
    )


def share(model: torch.nn.Module) -> None:
    """Have the shards in memory that other processes can map."""
    for tensor in [*model.parameters(), *model.buffers()]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local.untyped_storage().share_memory_()


def move(model: torch.nn.Module, number: int | None = None) -> None:
    """Other storages for this rank's shards, with the same values, as offloading and loading do."""
    kept = []
    for i, parameter in enumerate(model.parameters()):
        if number in (None, i):
            local = parameter._local_tensor.detach()
            kept.append(local)  # alive: nothing new can be where it is
            moved = local.clone()
            moved.untyped_storage().share_memory_()
            parameter._local_tensor = moved
            local.fill_(7)
    model._kept = kept  # type: ignore[assignment]


def pull_model(kind: str) -> dict[str, Any]:
    """Learn, then pull three times, with a step of the optimizer in between."""
    rank = Rank(kind)
    rank.sync(may_read=False)
    rank.sync()
    handles = []
    for _ in range(3):
        rank.step()
        rank.sync()
        rank.compare()
        handles.append(rank.num_handles)
    assert handles[0] < handles[1] == handles[2], "blocks that stay mapped need no new handles"
    return dataclasses.asdict(rank.seen)


def pull_offloaded() -> dict[str, Any]:
    """All parameters come back elsewhere before every sync."""
    rank = Rank("moe")
    rank.sync()
    for _ in range(3):
        move(rank.model)
        rank.step()
        rank.sync()
        rank.compare()
    return {**dataclasses.asdict(rank.seen), "keeps": rank.keeps}


def pull_emptied() -> dict[str, Any]:
    """Offloaded parameters come back into the same storages, at the same addresses perhaps."""
    rank = Rank("moe")
    rank.export.sources.empties_storages = True
    handles = []
    for _ in range(4):
        rank.step()
        rank.sync()
        handles.append(rank.num_handles)
        if rank.seen.routes[-1] == "pull":
            rank.compare()
    assert handles == [i * handles[1] for i in range(4)] != [0] * 4, "new ones for each sync"
    return {**dataclasses.asdict(rank.seen), "keeps": rank.keeps}


def pull_moved(on: int) -> dict[str, Any]:
    """One shard moves on one rank alone, after all were located."""
    rank = Rank("dense")
    for _ in range(3):
        rank.sync()
    if dist.get_rank() == on:
        move(rank.model, number=2)
    rank.sync()
    rank.compare()
    return dataclasses.asdict(rank.seen)


def pull_other_parameters() -> dict[str, Any]:
    """A parameter that was tied is not tied any more: what was traced holds no longer."""
    rank = Rank("tied")
    for _ in range(3):
        rank.sync()
    model = rank.model
    head = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    head.to_local().untyped_storage().share_memory_()
    model.lm_head.weight = head
    with torch.no_grad():
        head.to_local().add_(1)
    rank.sync()
    rank.sync()
    rank.compare()
    return dataclasses.asdict(rank.seen)


def pull_engine_forgot() -> dict[str, Any]:
    """One rank's engine was started anew: it has nothing mapped, and the handles are used."""
    from verl_sglang_sync.engine.session import BlockNotMapped

    rank = Rank("dense")
    for _ in range(3):
        rank.sync()
    rank.mapped.clear()
    read = rank._read

    def forgetful() -> None:
        if not rank.mapped and all(block.handle is None for block in rank.pull.blocks):
            raise BlockNotMapped("gone")
        read()

    rank._read = forgetful  # type: ignore[method-assign]
    rank.sync()
    rank.compare()
    return {**dataclasses.asdict(rank.seen), "keeps": rank.keeps}


def pull_refused(case: str) -> dict[str, Any]:
    """What cannot be pulled is exported, on all ranks, for a reason that all ranks say."""
    from verl_sglang_sync.engine.session import EngineCannotMap
    from verl_sglang_sync.sources import export_trace, shard_memory

    rank = Rank("moe", is_shared=case != "private")
    if case == "hosts":
        with mock.patch.object(shard_memory, "host_id", lambda: f"host {dist.get_rank() // 2}"):
            rank.sync()
    elif case == "wrong trace":
        spoiled = _spoiled_on_rank_1(export_trace.trace_export)
        with mock.patch("verl_sglang_sync.sources.source_map.trace_export", spoiled):
            rank.sync()
    else:
        rank.sync()
    if case == "mapping":
        _fail_on(1, rank, EngineCannotMap("no access"))
    rank.sync()
    return dataclasses.asdict(rank.seen) | {"off": rank.pull.off}


def _spoiled_on_rank_1(trace: Any) -> Any:
    """All ranks trace alike, but swap two tensors."""

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        traced = trace(*args, **kwargs)
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        other = traced.tensors[name.replace("up_proj", "gate_proj")]
        return dataclasses.replace(traced, tensors={**traced.tensors, name: other})

    return spoiled


def pull_rechecked() -> dict[str, Any]:
    """Every second sync goes through the export."""
    rank = Rank("dense", recheck=2)
    for _ in range(5):
        rank.step()
        rank.sync()
    return dataclasses.asdict(rank.seen)


def _fail_on(number: int, rank: Rank, error: Exception) -> None:
    """The engine of one rank fails."""
    side_effect = error if dist.get_rank() == number else None
    rank._read = mock.Mock(side_effect=side_effect)  # type: ignore[method-assign]


def pull_other_failure() -> list[str]:
    """A failure that has nothing to do with the pull is not recovered from."""
    rank = Rank("dense")
    rank.sync()
    _fail_on(2, rank, RuntimeError("the engine failed"))
    rank.sync()
    return rank.seen.recoveries
