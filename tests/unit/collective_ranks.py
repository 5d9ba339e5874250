"""What each of the pool's ranks does in a test of the trainer's collectives."""

import asyncio
import os
import time

import torch
import torch.distributed as dist

from sglang_loader.common.broadcast.broadcast import all_to_all
from sglang_loader.common.broadcast.update_group import leave
from unit.trainer_ranks import trainer_group
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.collective import (
    RankLost,
    TorchTrainerGroup,
    common_reason,
    holds_everywhere,
    run_in_step,
)

TIMEOUT_S = 2.0


def each_agrees(failures, waiting):
    rank = dist.get_rank()
    group = trainer_group(2)[0]
    return group.agree(failures.get(rank), is_ready=rank not in waiting, signature=rank << 40)


def each_asks():
    rank, (group, _) = dist.get_rank(), trainer_group(2)
    return (
        group.gather(bytes([rank])),
        group.all_gather({"rank": rank}),
        [holds_everywhere(group, rank != absent) for absent in (2, None)],
        [
            common_reason(group, None),
            common_reason(group, "slow" if rank == 3 else None),
            common_reason(group, None, signature=int(rank == 1)),
        ],
    )


def each_waits(takes_s, fails):
    """Wait in step for the parts that some ranks have: the error, and the seconds it took."""

    async def work():
        await asyncio.sleep(takes_s[rank])
        if rank == fails:
            raise ValueError("the engine refused")

    rank, started, error = dist.get_rank(), time.monotonic(), None
    try:
        part = work() if rank in takes_s else None
        asyncio.run(run_in_step(trainer_group(2)[0], "wake", part))
    except WeightSyncError as failed:
        error = str(failed)
    return error, time.monotonic() - started


def agree_without(victim, how):
    """One good agreement; then the victim is gone, and the others try two more."""
    group = TorchTrainerGroup(timeout_s=TIMEOUT_S)
    assert group.agree().is_ready
    if dist.get_rank() == victim:
        os.kill(os.getpid(), how)
    errors, started = [], time.monotonic()
    for _ in range(2):
        try:
            group.agree()
        except WeightSyncError as error:
            errors.append((type(error) is RankLost and str(error), time.monotonic() - started))
        started = time.monotonic()
    return errors


def come_late(victim):
    """The victim sleeps through an agreement; how that one ended, and the two after it."""
    group = TorchTrainerGroup(timeout_s=1.0)
    assert group.agree().is_ready
    if dist.get_rank() == victim:
        time.sleep(1.0 + 2.0 + 1.0)  # the limit, `MARGIN_S`, half of `ROLL_CALL_S`
    ends = []
    for _ in range(3):
        try:
            ends.append(None if group.agree().is_ready else "not ready")
        except RankLost as error:
            ends.append(str(error))
    return ends


def leaves_amid_an_exchange():
    """Ranks 0 and 1 begin it and leave the group, the others do neither: the seconds it takes."""
    group, nothing = dist.new_group(), torch.empty(0, dtype=torch.uint8)
    dist.barrier(group)
    started, sizes = time.monotonic(), [0] * dist.get_world_size()
    if dist.get_rank() < 2:
        all_to_all(nothing, sizes, nothing, sizes, group)
        leave(group, broken=True)
        del group  # the last reference, which waits for the exchange
    seconds = time.monotonic() - started
    dist.barrier()
    return seconds
