"""Trainer ranks as real processes on gloo.

    answers = pool.run(function, *args)      # by rank

The processes stay for the whole test session, so that a test may run a good sync after a failed one
in the same processes. A rank that does not answer in time ends the pool; the next run starts it
anew.
"""

import os
import socket
from functools import partial

import torch
import torch.distributed as dist

from support.remote import Remote, finish, results_of

WORLD_SIZE = 4
LIMIT_S = 60.0
TIMEOUT_S = 20.0


class RankPool:
    """`WORLD_SIZE` processes in one gloo group; each runs what it is sent. `folder` gets logs."""

    def __init__(self, folder):
        self._folder, self._ranks = folder, []

    def run(self, function, *args, limit_s=LIMIT_S, lost=()):
        """Call `function(*args)` on every rank; return the results by rank, None of the `lost`.

        None may fail, or take longer than `limit_s`; then all are ended.
        """
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.begin(lambda _: function(*args))
        awaited = [rank for rank in range(WORLD_SIZE) if rank not in lost]
        outcomes = finish([self._ranks[rank] for rank in awaited], limit_s)
        if None in outcomes:
            self.close()
        found = dict(zip(awaited, results_of(outcomes), strict=True))
        return [found.get(rank) for rank in range(WORLD_SIZE)]

    def close(self):
        for rank in self._ranks:
            rank.kill()  # also where it is stopped
            rank.end()
        self._ranks = []

    def _start(self):
        with socket.socket() as probe:  # rank 0 serves torch's store there, as in a trainer
            probe.bind(("127.0.0.1", 0))
            rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        for rank in range(WORLD_SIZE):
            join, log = partial(_join, rank, rendezvous), self._folder / f"rank{rank}.log"
            self._ranks.append(Remote(join, environment=os.environ, log=log))
        results_of(finish(self._ranks, 150))  # imports and rendezvous are not what tests time


def _join(rank, rendezvous):
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD_SIZE)


_ranks = {}


def trainer_ranks(tp):
    """The trainer's ranks, where each replica has `tp`, kept from case to case."""
    from torch.distributed.device_mesh import init_device_mesh

    from verl_sglang_sync.trainer_ranks import TrainerRanks

    if tp not in _ranks:
        mesh = init_device_mesh("cpu", (WORLD_SIZE // tp, tp), mesh_dim_names=("dp", "infer_tp"))[
            "infer_tp"
        ]
        _ranks[tp] = TrainerRanks(timeout_s=TIMEOUT_S, tp_mesh=mesh), mesh.get_local_rank() == 0
    return _ranks[tp]
