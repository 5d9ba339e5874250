"""Faults that are planted in the code that plans, sends, maps or copies weights, and stay there."""

import math
from dataclasses import replace
from functools import partial
from unittest import mock

import msgspec
import torch.distributed as dist

from sglang_loader.common.rounds import RoundPart
from sglang_loader.load_plan import executor
from sglang_loader.load_plan.copy_table import CopyTable
from unit.route_ranks import Rank
from verl_sglang_sync.engine.session import TrainerSession
from verl_sglang_sync.routes.table import located, weight_map_builder
from verl_sglang_sync.routes.table.sending import Sender, SendPlan
from verl_sglang_sync.sources.export_trace import TracedExport


def pieces_changed(change):
    """Pull: what the weight map says of the buckets' pieces is changed."""
    pieces_of = weight_map_builder.pieces_of

    def planted(*args):
        return change(pieces_of(*args))

    return mock.patch.object(weight_map_builder, "pieces_of", planted)


def place(piece, other):
    return msgspec.structs.replace(
        piece, slot=other.slot, offset=other.offset, dims=other.dims, shards=other.shards
    )


def swapped(pieces):
    """Two pieces of one size are where the other is, once in each bucket."""
    for i, one in enumerate(pieces):
        for j, other in enumerate(pieces[:i]):
            if one.nbytes == other.nbytes and one.nbytes > 256:
                found = [*pieces]
                found[i], found[j] = place(one, other), place(other, one)
                return found
    return pieces


def shifted(pieces):
    """The largest piece that can begins a word too early."""
    movable = [i for i, piece in enumerate(pieces) if piece.offset >= 4]
    at = max(movable, key=lambda i: pieces[i].nbytes, default=None)
    if at is None:
        return pieces
    moved = msgspec.structs.replace(pieces[at], offset=pieces[at].offset - 4)
    return [*pieces[:at], moved, *pieces[at + 1 :]]


def other_ranks():
    """Pull: the memory of the first rank counts as that of the second, and the other way round."""
    of = located.ParameterLocations.of

    def planted(plan, snapshot, tables, wires, readers):
        one, two, *others = tables
        turned = [replace(one, shards=two.shards), replace(two, shards=one.shards), *others]
        assert len(one.blocks) == len(two.blocks)
        return of(plan, snapshot, [turned[1], turned[0], *others], wires, readers)

    return mock.patch.object(located.ParameterLocations, "of", planted)


def swapped_blocks():
    """Pull: two blocks of one size are announced in each other's place."""
    announce = TrainerSession.map_blocks

    def planted(session, names, handles, *, keep):
        sizes = {}
        for i, name in enumerate(names):
            size = handles[name].nbytes if name in handles else 0
            if size in sizes and size > 256:
                names = [*names]
                j = sizes[size]
                names[i], names[j] = names[j], names[i]
                break
            sizes[size] = i
        announce(session, names, handles, keep=keep)

    return mock.patch.object(TrainerSession, "map_blocks", planted)


def other_origins():
    """Pull: two tensors of one size count as parts of each other's parameter."""
    origins_of = TracedExport.origins_of

    def planted(traced, layout):
        origins = origins_of(traced, layout)
        for i, one in enumerate(layout.tensors):
            for j, other in enumerate(layout.tensors[:i]):
                if one.nbytes == other.nbytes and one.nbytes > 256:
                    origins[i], origins[j] = origins[j], origins[i]
                    return origins
        return origins

    return mock.patch.object(TracedExport, "origins_of", planted)


def bases_changed():
    """Pull: two shards of one size are located in each other's place."""
    locate = located.bases_for

    def planted(traced, tables, wires, reader):
        alike = {}
        for i, owners in enumerate(traced.owners):
            j = alike.setdefault(owners, i)
            if i != j and owners.nbytes > 256:
                tables = [replace(table, shards=exchanged(table.shards, i, j)) for table in tables]
                break
        return locate(traced, tables, wires, reader)

    return mock.patch.object(located, "bases_for", planted)


def exchanged(items, i, j):
    changed = [*items]
    changed[i], changed[j] = changed[j], changed[i]
    return tuple(changed)


def table_changed(change):
    """Engine: the largest copy of the copy table is changed, or left out if that gives None."""
    join = CopyTable.of.__func__

    def planted(cls, plan, weight_map, limit):
        steps = list(join(cls, plan, weight_map, limit).steps)
        copies = list(steps[0].copies)
        at = max(range(len(copies)), key=lambda i: size_of(copies[i][0]))
        copies[at : at + 1] = change(*copies[at])
        steps[0] = replace(steps[0], copies=tuple(copies))
        return cls(tuple(steps))

    return mock.patch.object(CopyTable, "of", classmethod(planted))


def left_out(copy, number):
    return []


def of_half_the_length(copy, number):
    return [(msgspec.structs.replace(copy, run=copy.run // 2), number)]


def size_of(copy):
    return copy.run * math.prod(count for count, _, _ in copy.dims)


def rounds_changed(change):
    """Engine: what the first round copies into the model is changed."""
    wire = executor.wired_steps

    def planted(*args):
        steps = list(wire(*args))
        at = next((i for i, step in enumerate(steps) if step.rounds), None)
        if at is not None:
            first, *others = steps[at].rounds
            copies = change(list(first.copies))
            rounds = (replace(first, copies=tuple(copies)), *others)
            steps[at] = replace(steps[at], rounds=rounds)
        return tuple(steps)

    return mock.patch.object(executor, "wired_steps", planted)


def read_early(copies):
    """The largest copy that can reads the buffer a word too early."""
    movable = [copy for copy in copies if copy.src >= 8]
    copy = max(movable, key=size_of)
    copies[copies.index(copy)] = msgspec.structs.replace(copy, src=copy.src - 8)
    return copies


def largest_left_out(copies):
    copies.remove(max(copies, key=size_of))
    return copies


def packed_wrongly():
    """Exchange: 8 bytes of every round are packed wrongly."""
    pack = Sender.pack

    def planted(sender, number):
        pack(sender, number)
        sent = sender._scratch_of(number)
        if sent.numel():
            sent[:8] ^= 0x55

    return mock.patch.object(Sender, "pack", planted)


def sent_changed(change):
    """Exchange: a trainer rank packs other bytes than the engine ranks have listed."""
    plan = SendPlan.of.__func__

    def planted(cls, traced, readers, *places):
        changed = [
            [RoundPart(tuple(change(list(part.reads))), part.size) for part in parts]
            for parts in readers
        ]
        return plan(cls, traced, changed, *places)

    return mock.patch.object(SendPlan, "of", classmethod(planted))


def packed_in_other_order(reads):
    sizes = {}
    for i, read in enumerate(reads):
        if read.nbytes > 256 and (j := sizes.get(read.nbytes)) is not None:
            one, other = reads[i], reads[j]
            reads[i] = msgspec.structs.replace(other, start=one.start)
            reads[j] = msgspec.structs.replace(one, start=other.start)
            break
        sizes[read.nbytes] = i
    return reads


def of_another_place(reads):
    """What is sent begins a word later in the shard."""
    return [
        msgspec.structs.replace(read, offset=read.offset - 4 * (read.offset >= 4)) for read in reads
    ]


FAULTS = {
    "pull": {
        "two tensors swapped": partial(pieces_changed, swapped),
        "a wrong offset": partial(pieces_changed, shifted),
        "another rank's memory": other_ranks,
        "blocks swapped": swapped_blocks,
        "tensors swapped before they are found": other_origins,
        "a wrong base": bases_changed,
        "a copy left out": partial(table_changed, left_out),
        "a copy cut short": partial(table_changed, of_half_the_length),
    },
    "exchange": {
        "received bytes read elsewhere": partial(rounds_changed, read_early),
        "a received copy left out": partial(rounds_changed, largest_left_out),
        "bytes packed wrongly": packed_wrongly,
        "reads packed in another order": partial(sent_changed, packed_in_other_order),
        "bytes of another place in the shard": partial(sent_changed, of_another_place),
        "two tensors swapped": partial(pieces_changed, swapped),
        "a copy left out": partial(table_changed, left_out),
    },
}
CASES = [(route, fault) for route, faults in FAULTS.items() for fault in faults]


class FaultyRank(Rank):
    """A rank in whose process faults can be planted, for good."""

    def plant(self, fault, on):
        if on in (None, dist.get_rank()):
            self.planted = FAULTS[self.name][fault]()
            self.planted.start()

    def mend(self):
        planted = getattr(self, "planted", None)
        if planted is not None:
            planted.stop()
