"""Seconds, memory and size of the plans of the largest models, on one CPU; shapes alone.

    python benchmarks/plan_scale.py --json FILE
    python benchmarks/plan_scale.py --cases kimi-k2-512

Built by the project's own code, for one trainer rank and its engine rank, as they do it once before
their second sync: what all ranks have traced is merged (`sources.source_map`), the trainer rank
maps the weights and locates the shards (`routes.table`). The engine rank joins the map with its
load plan and lists the rounds of what it cannot map (`load_plan`). The trainer rank plans what it
packs. What other engine ranks list is not made: it packs as much as is packed for its own
engine rank. No weight is allocated, nothing is sent. Every case is a process of its own.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins")]

from benchmarks.scale_ranks import CASES, Case, EngineRank, summary_of, trace_of  # noqa: E402
from sglang_loader.common.garbage_collection import no_full_collections  # noqa: E402
from sglang_loader.common.layout import BucketLayout  # noqa: E402
from sglang_loader.common.rounds import (  # noqa: E402
    SentRound,
    decode_parts,
    decode_rounds,
    encode_parts,
    encode_rounds,
    parts_of,
)
from sglang_loader.common.weight_map import (  # noqa: E402
    MAPPED,
    SENT,
    decode_bases,
    decode_weight_map,
)
from sglang_loader.load_plan.copy_table import CopyTable  # noqa: E402
from sglang_loader.load_plan.rounds import num_bytes_read, wired_steps  # noqa: E402
from verl_sglang_sync.commands.bench.results_file import write_results  # noqa: E402
from verl_sglang_sync.routes.table.sending import SendPlan  # noqa: E402
from verl_sglang_sync.routes.table.table_route import ROUNDS_PER_BUCKET  # noqa: E402
from verl_sglang_sync.routes.table.weight_map_builder import (  # noqa: E402
    MemoryTable,
    bases_for,
    weight_map_of,
)
from verl_sglang_sync.routes.table.wires import Wires  # noqa: E402
from verl_sglang_sync.sources.bucket_cutter import Bucket, BucketFiller  # noqa: E402
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
    buckets = [Bucket.of(layout, is_last=False) for layout in layouts_of(case)]
    hosts = tuple(f"node {number // NODE}" for number in range(case.ranks))
    wires = Wires(hosts, hosts, first_reader=0, can_map=True)
    with timed(seconds, "weight map"):
        stored = weight_map_of(buckets, traced)
    sizes["weight_map_bytes"] = len(stored.data)
    tables = [MemoryTable({}, ((0, 0),) * len(traced.parameters)) for _ in range(case.ranks)]
    with timed(seconds, "bases"):
        bases = bases_for(traced, tables, wires, rank)
    sizes["bases_bytes"] = len(bases.data)
    with timed(seconds, "decode the map"):
        weight_map = decode_weight_map(stored.data)
    plan = EngineRank(case, rank % case.engine).plan(weight_map.layouts)
    with timed(seconds, "copy table"):
        table = CopyTable.of(plan, weight_map, BUCKET_BYTES // ROUNDS_PER_BUCKET)
    sizes["table_copies"] = sum(len(step.copies) for step in table.steps)
    located = decode_bases(bases.data)
    senders = tuple(np.where(located[:, 0] == SENT, located[:, 1], MAPPED).tolist())
    with timed(seconds, "list rounds"):
        steps = wired_steps(table, senders, case.ranks, BUCKET_BYTES // ROUNDS_PER_BUCKET)
        rounds = [each.sent for step in steps for each in step.rounds]
    with timed(seconds, "exchange rounds"):
        data = encode_rounds(rounds)
        rounds = decode_rounds(data, case.ranks)
        parts = [encode_parts({rank: parts_of(rounds, sender)}) for sender in range(case.ranks)]
        incoming = [decode_parts(part)[rank] for part in parts]
    sizes["rounds_bytes"] = len(data)
    sizes["sent_reads"] = sum(len(part.reads) for each in rounds for part in each.parts)
    # What this rank packs for others is as much as others pack for its engine rank.
    with timed(seconds, "plan what is packed"):
        send_plan = SendPlan.of(traced, incoming, list(range(case.ranks)), case.ranks)
    sizes["packed_copies"] = sum(len(each.copies) for each in send_plan.packed)
    seconds.pop("of other stages")
    received = Counter[int]()
    for each in rounds:
        received.update(dict(enumerate(each.payloads)))
    mapped = sum(num_bytes_read(copy) for step in steps for copy, _ in step.mapped)
    return {
        "num_tensors": len(case.weights),
        "bytes": sum(weight.nbytes for weight in case.weights),
        "num_buckets": len(buckets),
        "rank": rank,
        "median_s": {**seconds, "all": sum(seconds.values())},
        "host_bytes": _peak_bytes() - before,
        **sizes,
        **predicted(received, mapped, rounds),
    }


def predicted(
    received: Mapping[int, int], mapped: int, rounds: Sequence[SentRound]
) -> dict[str, Any]:
    """Bytes by wire, and the seconds that are predicted for one sync.

    Args:
        received: the bytes from each trainer rank that sends.
        mapped: the bytes that are read in mapped memory.
        rounds: of the engine rank.
    """
    network = sum(received.values())
    num_messages = sum(bool(size) for each in rounds for size in each.sizes)
    spent = {
        "network": network / RATES["network"],
        "mapped": mapped / RATES["nvlink"],
        "copies": 3 * network / RATES["own memory"],  # into the scratch, the buffer, the engine
        "messages": (len(rounds) + 2 * num_messages) * MESSAGE_S,
    }
    return {
        "num_peers": sum(map(bool, received.values())),
        "largest_pair_bytes": max(received.values(), default=0),
        "mapped_bytes": mapped,
        "network_bytes": network,
        "num_rounds": len(rounds),
        "num_messages": num_messages,
        "predicted_s": {
            **spent,
            "all at a time": max(spent.values()),
            "one after another": sum(spent.values()),
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
        with no_full_collections():  # as in a sync
            row = measure(CASES[args.alone])
        print(json.dumps(row))
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
