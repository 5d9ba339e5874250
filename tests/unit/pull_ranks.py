"""What each rank does in the tests of pulled parameters: its engine maps what it is told to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from sglang_loader.common.bucket_source import BucketSource, Piece
from sglang_loader.common.shared_memory import map_buffer
from unit import route_ranks
from unit.route_ranks import CPU, Rank, sharded


class EngineMemory:
    """What one engine rank maps, and reads: its end of a session.

    Attributes:
        mapped: its memory, by the block's name.
        keeps: it was to keep that after the last sync.
        was_read: tensors of the last sync.
    """

    def __init__(self) -> None:
        self.mapped: dict[str, torch.Tensor] = {}
        self.was_read: dict[str, torch.Tensor] = {}
        self.keeps = False

    def map_blocks(self, blocks: Sequence[Any], *, keep: bool) -> None:
        """As a session with the engine does; the slots are the positions of the blocks."""
        from verl_sglang_sync.engine.session import BlockNotMapped

        self.keeps, self.slots, self.was_read = keep, [], {}
        for block in blocks:
            if block.name not in self.mapped:
                if block.handle is None:
                    raise BlockNotMapped("gone")
                self.mapped[block.name] = map_buffer(block.handle, CPU)
            self.slots.append(self.mapped[block.name])

    def load(self, index: int, bucket: Any, pieces: Any, *, read_only: bool) -> None:
        """Keep what the bucket is now."""
        assert read_only
        assert not any(piece.shards for piece in pieces)
        memory = [
            Piece.flat(p.start, self.slots[p.slot][p.offset : p.offset + p.nbytes]) for p in pieces
        ]
        packed = BucketSource(memory).packed(bucket.layout)
        views = bucket.layout.views(packed)
        self.was_read |= {name: tensor.clone() for name, tensor in views}


class PullRank(Rank):
    """A rank whose engines keep what they have mapped, where they are to.

    Args:
        kind: of the model.
        is_shared: its parameters are in memory that can be mapped.
        recheck: see `Rank`.
        num_engines: engine ranks of this rank.

    Attributes:
        num_handles: that were made for engines.
        engines: of this rank.
    """

    def __init__(
        self, kind: str, *, is_shared: bool = True, recheck: int = 0, num_engines: int = 1
    ) -> None:
        model = sharded(kind)
        if is_shared:
            share(model)
        self.num_handles = 0
        self.engines = [EngineMemory() for _ in range(num_engines)]
        self.readers: Sequence[Any] = list(self.engines)
        super().__init__(model, recheck=recheck)

    @property
    def num_engines(self) -> int:
        """See `Rank`."""
        return len(self.engines)

    def move(self, on: int | None = None, number: int | None = None) -> None:
        """Other storages for shards, with the same values, as offloading and loading do.

        Args:
            on: which rank's; None: those of all.
            number: of the one parameter that moves; None: all do.
        """
        if on not in (None, dist.get_rank()):
            return
        kept = []
        for i, parameter in enumerate(self.model.parameters()):
            if number in (None, i):
                local = parameter._local_tensor.detach()
                kept.append(local)  # alive: nothing new can be where it is
                moved = local.clone()
                moved.untyped_storage().share_memory_()
                parameter._local_tensor = moved
                local.fill_(7)
        self._kept = kept

    def restart_engines(self) -> None:
        """The engines were started anew: they have nothing mapped, and the handles are used."""
        for engine in self.engines:
            engine.mapped.clear()

    def fail_on(self, number: int, error: Exception) -> None:
        """From now on the engine of one rank fails."""
        side_effect = error if dist.get_rank() == number else None
        self.read = mock.Mock(side_effect=side_effect)  # type: ignore[method-assign]

    def make_route(self) -> Any:
        from verl_sglang_sync.routes.pull.route import Pull

        return Pull(self.context, is_wanted=True, record=self._count)

    def _count(self, handle: object) -> None:
        self.num_handles += 1

    def read(self, source: Any) -> None:
        from verl_sglang_sync.engine.arrangements import EngineArrangements
        from verl_sglang_sync.engine.engine_ranks import EngineRank, OpeningRequest

        nothing = OpeningRequest(None, None), EngineArrangements(is_wanted=False)
        engines: Any = [EngineRank("", engine, *nothing) for engine in self.engines]  # type: ignore[arg-type]
        delivery = source.delivery(engines, lambda step: step())
        assert all(delivery.deliver(ready) for ready in source)
        source.confirm()
        for engine in self.engines:
            self.seen.counts["keeps"] = engine.keeps
            if not engine.keeps:
                engine.mapped.clear()

    def compare(self) -> list[str]:
        full = dict(self.export)
        assert any(tensor.any() for tensor in full.values())
        wrong = []
        for engine in self.engines:
            assert full.keys() == engine.was_read.keys()
            wrong += [k for k, want in full.items() if not torch.equal(engine.was_read[k], want)]
        return wrong


def share(model: torch.nn.Module) -> None:
    """Have the shards in memory that other processes can map."""
    for tensor in [*model.parameters(), *model.buffers()]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local.untyped_storage().share_memory_()


def pull_model(kind: str) -> dict[str, Any]:
    """Learn, then pull three times, with a step of the optimizer in between."""
    rank = PullRank(kind)
    rank.sync(may_read=False)
    rank.sync()
    handles = []
    for _ in range(3):
        rank.step()
        rank.sync()
        handles.append(rank.num_handles)
    assert handles[0] < handles[1] == handles[2], "blocks that stay mapped need no new handles"
    return dataclasses.asdict(rank.seen)


def pull_by_many_engines_of_one_rank() -> dict[str, Any]:
    """The first rank has three engine ranks, and other ones later; the others have none."""
    is_first = dist.get_rank() == 0
    rank = PullRank("moe", num_engines=3 if is_first else 0)
    rank.context.first_reader = dist.get_world_size()
    rank.route = rank.make_route()
    rank.sync()
    rank.sync()
    handles = [rank.num_handles]
    if is_first:
        rank.engines = [EngineMemory() for _ in range(2)]
        rank.readers = list(rank.engines)
    for _ in range(3):
        rank.step()
        rank.sync()
    handles.append(rank.num_handles)
    assert 2 * handles[0] == 3 * (handles[1] - handles[0]), "one for each engine rank"
    return dataclasses.asdict(rank.seen)


def pull_emptied() -> dict[str, Any]:
    """Offloaded parameters come back into the same storages, at the same addresses perhaps."""
    rank = PullRank("moe")
    rank.export.sources.empties_storages = True
    handles = []
    for _ in range(4):
        rank.step()
        rank.sync()
        handles.append(rank.num_handles)
        if rank.seen.routes[-1] == "pull":
            rank.compare()
    assert handles == [i * handles[1] for i in range(4)] != [0] * 4, "new ones for each sync"
    return dataclasses.asdict(rank.seen)


def pull_other_parameters() -> dict[str, Any]:
    """A parameter that was tied is not tied any more: what was traced holds no longer."""
    rank = PullRank("tied")
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
    return dataclasses.asdict(rank.seen)


def pull_from_freed_memory(num_failures: int) -> dict[str, Any]:
    """One rank's parameters move after they were located, and engines cannot map where they were,
    or map nothing at all.
    """
    from verl_sglang_sync.engine.session import EngineCannotMap

    rank = PullRank("moe")
    errors = [EngineCannotMap("freed")] * num_failures

    def read(source: Any) -> None:
        if errors:
            raise errors.pop()
        PullRank.read(rank, source)

    rank.read = read  # type: ignore[method-assign]
    for _ in range(3):
        rank.sync()
        rank.move(on=0)
    return dataclasses.asdict(rank.seen) | {"off": rank.route.off}


def pull_refused(case: str) -> dict[str, Any]:
    """What cannot be pulled is exported, on all ranks, for a reason that all ranks say."""
    from verl_sglang_sync.engine.session import EngineCannotMap
    from verl_sglang_sync.routes.pull import route as pull_route
    from verl_sglang_sync.sources import export_trace

    rank = PullRank("moe", is_shared=case != "private")
    if case == "engine elsewhere":
        with mock.patch.object(route_ranks, "HOST", "another"):
            rank.sync()
    elif case == "hosts":
        host = f"host {dist.get_rank() // 2}"
        with (
            mock.patch.object(pull_route, "host_id", lambda: host),
            mock.patch.object(route_ranks, "HOST", host),
        ):
            rank.sync()
    elif case == "wrong trace":
        spoiled = _spoiled_on_rank_1(export_trace.trace_export)
        with mock.patch("verl_sglang_sync.sources.source_map.trace_export", spoiled):
            rank.sync()
    else:
        rank.sync()
    if case == "mapping":
        rank.fail_on(1, EngineCannotMap("no access"))
    rank.sync()
    return dataclasses.asdict(rank.seen) | {"off": rank.route.off}


def _spoiled_on_rank_1(trace: Any) -> Any:
    """All ranks trace alike, but swap two tensors."""

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        traced = trace(*args, **kwargs)
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        other = traced.tensors[name.replace("up_proj", "gate_proj")]
        return dataclasses.replace(traced, tensors={**traced.tensors, name: other})

    return spoiled
