"""Seconds, memory and size of the plans of the largest models, on one CPU; shapes alone.

    python benchmarks/plan_scale.py --json FILE
    python benchmarks/plan_scale.py --cases kimi-k2-512

Built by the project's own code, for one trainer rank and its engine rank, as they do it once before
their second sync: what all ranks have traced is merged (`sources.source_map`), the engine rank
arranges its plan (`load_plan.arrange`), and the trainer rank plans what it sends to and receives
from all others (`routes.exchange`). No weight is allocated, nothing is sent: what 512 ranks would
say is computed here, and what it weighs on the wire is pickled. Every case is a process of its own.

Then the seconds of one sync are predicted, from the bytes of the plan and the rates in `RATES`.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins")]

from benchmarks.scale_ranks import CASES, Case, EngineRank, summary_of, trace_of  # noqa: E402
from sglang_loader.common.layout import BucketLayout  # noqa: E402
from sglang_loader.common.regions.arrangement import Read  # noqa: E402
from verl_sglang_sync.commands.bench.results_file import write_results  # noqa: E402
from verl_sglang_sync.routes.exchange import PIECES_PER_BUCKET  # noqa: E402
from verl_sglang_sync.routes.shards.exchange_plan import (  # noqa: E402
    PieceSends,
    Received,
    Sends,
    pieces_of,
    plan_reader,
    plan_sends,
    received,
    total_nbytes,
)
from verl_sglang_sync.sources.bucket_cutter import BucketFiller  # noqa: E402
from verl_sglang_sync.sources.export_trace import TracedExport  # noqa: E402
from verl_sglang_sync.sources.source_map import TraceSummary, merge_traces  # noqa: E402

BUCKET_BYTES = 2 << 30
NODE = 8
"""Ranks of a node: they follow each other, and reach each other over NVLink."""

RATES = {"nvlink": 338e9, "network": 50e9, "own memory": 1.6e12}
"""Bytes per second of one GPU, each way. Of these the network's is assumed (400 Gb/s a GPU); the
others are measured on H200s (results/peer_reads): NVLink both ways at once, and a copy of short
runs within a GPU.
"""
MESSAGE_S = 20e-6
"""Assumed: what one collective, and each message of it, adds on a network that is not idle."""


def layouts_of(case: Case) -> list[BucketLayout]:
    """The buckets of the export."""
    filler = BucketFiller(bucket_bytes=BUCKET_BYTES)
    specs = ((w.name, (w.rows, w.columns), torch.bfloat16) for w in case.weights)
    cut = [layout for spec in specs for layout in filler.add(spec)]
    return [*cut, *filler.finish()]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the processor's seconds of the body."""
    started = time.process_time()
    try:
        yield
    finally:
        seconds[name] += time.process_time() - started


def merge(case: Case, seconds: dict[str, float], sizes: dict[str, int]) -> TracedExport:
    """What all ranks have traced, as one rank puts it together."""
    summaries: list[TraceSummary] = []
    traces: list[TracedExport | None] = []
    for rank in range(case.ranks):
        traced = None if rank % case.stage_size else trace_of(case, rank)
        traces.append(traced)
        if traced is None:
            summaries.append(summary_of(case, rank, summaries[-1].structure_checksum))
            continue
        with timed(seconds, "of other stages" if rank else "name ranks"):
            summaries.append(TraceSummary.of(traced))
    last = TraceSummary.of(trace_of(case, case.ranks - 1))
    assert summaries[-1].structure_checksum == last.structure_checksum
    sizes["gathered_trace_bytes"] = len(pickle.dumps(summaries)) + len(pickle.dumps(traces))
    with timed(seconds, "merge"):
        return merge_traces(summaries, traces)


def measure(case: Case) -> dict[str, Any]:
    """A row of the results."""
    seconds: defaultdict[str, float] = defaultdict(float)
    sizes: dict[str, int] = {}
    rank = case.ranks // 2 + 3
    before = _peak_bytes()
    traced = merge(case, seconds, sizes)
    layouts = layouts_of(case)
    own = EngineRank(case, rank % case.engine)
    with timed(seconds, "engine plan"):
        made = [own.arranged(layout) for layout in layouts]
    sizes["engine_reads"] = sum(len(arrangement) for arrangement, _ in made)
    sizes["engine_copies"] = sum(copies for _, copies in made)
    engines = (EngineRank(case, each) for each in range(case.engine))
    arrangements = [[engine.listed(layout) for layout in layouts] for engine in engines]
    assert sizes["engine_reads"] == sum(len(each) for each in arrangements[0])
    arrangements[rank % case.engine] = [arrangement for arrangement, _ in made]
    encoded = [pickle.dumps(each) for each in arrangements]
    sizes["gathered_arrangement_bytes"] = sum(map(len, encoded))
    del arrangements
    with timed(seconds, "gather"):
        everyones = [pickle.loads(each) for each in encoded]
    exchanged = Exchanged(case, rank)
    for index, layout in enumerate(layouts):
        of_bucket = [everyones[each % case.engine][index] for each in range(case.ranks)]
        with timed(seconds, "plan"):
            origins, owners = traced.origins_of(layout), traced.owners
            sends = plan_sends(rank, of_bucket, origins, owners)
            needed = total_nbytes(chain(*sends)) * PIECES_PER_BUCKET
            pieces = pieces_of(sends, max(1, -(-needed // BUCKET_BYTES)))
            receives = plan_reader(rank, case.ranks, of_bucket[rank], origins, owners)
            found = received(receives, len(pieces))
        exchanged.add(sends, receives, pieces, found)
    seconds.pop("of other stages")
    return {
        "num_tensors": len(case.weights),
        "bytes": sum(weight.nbytes for weight in case.weights),
        "num_buckets": len(layouts),
        "rank": rank,
        "median_s": {**seconds, "all": sum(seconds.values())},
        "host_bytes": _peak_bytes() - before,
        **sizes,
        **exchanged.as_row(),
    }


class Exchanged:
    """What one rank sends and receives in a sync.

    Args:
        case: the trainer.
        rank: of it.
    """

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._rank = case, rank
        self._regions: Counter[str] = Counter()
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._own_bytes = self._num_collectives = self._num_messages = 0

    def add(
        self,
        sends: Sends,
        receives: Sequence[Sequence[Read]],
        pieces: Sequence[PieceSends],
        found: Received,
    ) -> None:
        """Count one bucket's plan."""
        self._regions["own"] += len(sends[self._rank])
        self._own_bytes += total_nbytes(sends[self._rank])
        for name, reads, counted in (
            ("sends", sends, self._sent),
            ("receives", receives, self._received),
        ):
            for peer, parts in enumerate(reads):
                if parts and peer != self._rank:
                    self._regions[name] += len(parts)
                    counted[peer] += total_nbytes(parts)
        self._regions["found"] += len(found.pieces)
        self._num_collectives += len(pieces)
        self._num_messages += sum(
            sum(map(bool, piece.nbytes)) + sum(map(bool, sizes))
            for piece, sizes in zip(pieces, found.sizes, strict=True)
        )

    def as_row(self) -> dict[str, Any]:
        """Counts, bytes by pair, and the seconds that are predicted."""
        near = {peer for peer in range(self._case.ranks) if peer // NODE == self._rank // NODE}

        def over(counted: Counter[int], *, is_near: bool) -> int:
            return sum(nbytes for peer, nbytes in counted.items() if (peer in near) == is_near)

        sent, received = self._sent, self._received
        network = max(over(sent, is_near=False), over(received, is_near=False))
        nvlink = max(over(sent, is_near=True), over(received, is_near=True))
        arranged = self._own_bytes + sum(received.values())
        # own parts and sends to scratch, own parts to staging, staging to the engine's memory
        copied = 2 * self._own_bytes + sum(sent.values()) + arranged
        predicted = {
            "network": network / RATES["network"],
            "nvlink": nvlink / RATES["nvlink"],
            "copies": copied / RATES["own memory"],
            "messages": (self._num_collectives + self._num_messages) * MESSAGE_S,
        }
        return {
            "num_regions": dict(self._regions),
            "num_peers": {"sends": len(sent), "receives": len(received)},
            "largest_pair_bytes": max((*sent.values(), *received.values()), default=0),
            "network_bytes": network,
            "nvlink_bytes": nvlink,
            "own_bytes": self._own_bytes,
            "arranged_bytes": arranged,
            "num_collectives": self._num_collectives,
            "num_messages": self._num_messages,
            "predicted_s": {
                **predicted,
                "all at a time": max(predicted.values()),
                "one after another": sum(predicted.values()),
            },
        }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    """Measure all cases; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(CASES[args.alone])))
        return
    rows: list[dict[str, Any]] = []
    for name in args.cases:
        command = [sys.executable, __file__, "--alone", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        case = asdict(CASES[name])
        row = {"arm": name, "model": case.pop("model"), "gpus": 0, "tp": case["engine"], "runs": 1}
        rows.append(row | {"layout": case} | json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if args.json:
        write_results(args.json, "plan_scale", rows)


if __name__ == "__main__":
    main()
