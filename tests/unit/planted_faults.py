"""Faults that are planted in the code that plans, sends, maps or copies weights, and stay there."""

import math
from dataclasses import replace
from functools import partial
from unittest import mock

import msgspec
import torch.distributed as dist

from sglang_loader.common.session.messages import PIECES, decode, encode_pieces
from sglang_loader.load_plan import executor
from unit.route_ranks import Rank
from verl_sglang_sync.engine.session import TrainerSession
from verl_sglang_sync.routes.pull import located
from verl_sglang_sync.routes.shards import exchange_plan, shard_route
from verl_sglang_sync.routes.shards.all_to_all import AllToAll
from verl_sglang_sync.sources import shard_reads


def pieces_changed(change):
    """Pull: what the engines are told of the buckets' pieces is changed."""
    pieces_for = located.pieces_for

    def planted(*args):
        return tuple(encode_pieces(change(decode(PIECES, each))) for each in pieces_for(*args))

    return mock.patch.object(located, "pieces_for", planted)


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

    def planted(plan, snapshot, tables, readers, first):
        one, two, *others = tables
        turned = [replace(one, shards=two.shards), replace(two, shards=one.shards), *others]
        assert len(one.blocks) == len(two.blocks)
        return of(plan, snapshot, [turned[1], turned[0], *others], readers, first)

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


def other_strides():
    """Pull and exchange: what lies apart in a parameter counts as lying elsewhere."""
    whole = shard_reads.whole_bucket

    def planted(layout):
        reads = list(whole(layout))
        for i, one in enumerate(reads):
            for j, other in enumerate(reads[:i]):
                if one.run == other.run and one.run > 256:
                    reads[i] = replace(one, tensor=other.tensor)
                    reads[j] = replace(other, tensor=one.tensor)
                    return tuple(reads)
        return tuple(reads)

    return mock.patch.object(located, "whole_bucket", planted)


def size_of(copy):
    return copy.run * math.prod(count for count, _, _ in copy.dims)


def a_copy_is_left_out():
    """Engine: the kernel leaves out the largest copy of each bucket that comes in pieces."""
    make = executor._Copies.__init__

    def planted(copies, plan, bucket_map):
        if len(bucket_map.pieces) > 1 and plan.copies:
            largest = max(plan.copies, key=size_of)
            kept = tuple(copy for copy in plan.copies if copy is not largest)
            make(copies, replace(plan, copies=kept), bucket_map)
            copies.plan = plan
        else:
            make(copies, plan, bucket_map)

    return mock.patch.object(executor._Copies, "__init__", planted)


def received_elsewhere():
    """Exchange: two pieces of one size count as received in each other's place."""
    receive = shard_route.received

    def planted(*args, **keys):
        found = receive(*args, **keys)
        return replace(found, pieces=swapped(found.pieces))

    return mock.patch.object(shard_route, "received", planted)


def packed_wrongly():
    """Exchange: 8 bytes of every piece are packed wrongly."""
    pack = AllToAll.pack

    def planted(moves, number):
        sent, sizes = pack(moves, number)
        if sent.numel():
            sent[:8] ^= 0x55
        return sent, sizes

    return mock.patch.object(AllToAll, "pack", planted)


def sent_in_other_order():
    """Exchange: two reads of one size are packed in each other's place."""
    pieces_of = shard_route.pieces_of

    def planted(sends, num):
        changed = []
        for reads in sends:
            reads = list(reads)
            sizes = {}
            for i, read in enumerate(reads):
                if read.nbytes > 256 and (j := sizes.get(read.nbytes)) is not None:
                    one, other = reads[i], reads[j]
                    reads[i] = replace(other, start=one.start)
                    reads[j] = replace(one, start=other.start)
                    break
                sizes[read.nbytes] = i
            changed.append(tuple(reads))
        return pieces_of(tuple(changed), num)

    return mock.patch.object(shard_route, "pieces_of", planted)


def of_another_shard():
    """Exchange: what is sent begins a word later in the shard."""
    plan = exchange_plan.plan_sends

    def planted(*args):
        return tuple(
            tuple(
                replace(read, offset=read.offset - 4 if read.offset >= 4 else read.offset)
                for read in reads
            )
            for reads in plan(*args)
        )

    return mock.patch.object(shard_route, "plan_sends", planted)


FAULTS = {
    "pull": {
        "two tensors swapped": partial(pieces_changed, swapped),
        "a wrong offset": partial(pieces_changed, shifted),
        "another rank's memory": other_ranks,
        "blocks swapped": swapped_blocks,
        "tensors swapped before they are found": other_strides,
        "a copy left out": a_copy_is_left_out,
    },
    "exchange": {
        "received pieces swapped": received_elsewhere,
        "bytes packed wrongly": packed_wrongly,
        "reads packed in another order": sent_in_other_order,
        "bytes of another place in the shard": of_another_shard,
        "a copy left out": a_copy_is_left_out,
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
