"""The trainer of `disaggregated`: sends its weights to a server over a torch process group.

One process on its own GPU. Arms: `per_tensor`, `sglang_named` and `sglang_flattened` are SGLang's
stock `update_weights_from_distributed`. Ours are `disaggregated` and `disaggregated_compiled`,
which broadcast an export that does not say what it reads; `send` and `pull`, whose export is
traced. The weights are those of a model under FSDP2 with one rank; ours export it anew in every
sync.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arm import (
    Seconds,
    checksums_of_engine,
    child_arguments,
    measure_arm,
    run_arms,
    synchronize,
)
from benchmarks.arrival import advance, checksums
from support.stock_update import stock_group, update_from_distributed
from verl_sglang_sync.bench.arms import counts_of
from verl_sglang_sync.bench.engine_server import wait_until_healthy
from verl_sglang_sync.bench.trainers import NamedTensor, ShardedModel, size_of

STOCK = ("per_tensor", "sglang_named", "sglang_flattened")
TRACED = ("send", "pull")
OURS = {
    "disaggregated": "flattened",
    "disaggregated_compiled": "compiled",
    **dict.fromkeys(TRACED, "compiled"),
}
GROUP_ARMS = (*OURS, *STOCK)
TIMEOUT_S = 60.0

Batch = list[tuple[str, torch.Tensor]]


def main() -> None:
    """Make the weights, wait for the server, and measure."""
    args = child_arguments(__doc__.splitlines()[0])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    import verl_sglang_sync.sync.transport  # noqa: F401  imports while the server starts

    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = ShardedModel(args.model, device)
    wait_until_healthy(args.url, args.server_log)
    num_tensors, num_bytes = size_of(args.model, device)
    sent = {"num_tensors": num_tensors, "bytes": num_bytes}

    def measure(arm: str) -> dict[str, Any]:
        make = _ours if arm in OURS else _stock
        with make(arm, args.url, device, model, args.bucket_mb << 20) as (sync, notes):
            row = measure_arm(
                arm,
                runs=args.runs,
                device=args.device,
                sync=sync,
                advance=lambda: advance(model.shards()),
                trainer_checksums=lambda: checksums(model.export()),
                held_by_engine=checksums_of_engine(args.url, args.folder),
            )
        del sync
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return {**row, "model": args.model, **sent, **notes}

    run_arms(args.arms, args.rows, measure)


Made = tuple[Callable[[], Seconds], dict[str, Any]]


@contextmanager
def _ours(
    arm: str, url: str, device: torch.device, model: ShardedModel, bucket_bytes: int
) -> Iterator[Made]:
    """The transport that verl's trainer uses with `+weight_sync=disaggregated`."""
    from verl_sglang_sync.collective import SingleProcess
    from verl_sglang_sync.config import WeightSyncConfig
    from verl_sglang_sync.engine.update_groups import Replica, UpdateGroups
    from verl_sglang_sync.report import SyncReport
    from verl_sglang_sync.sync.transport import disaggregated_transport

    groups = UpdateGroups(address="127.0.0.1", device=device, timeout_s=TIMEOUT_S)
    replicas = [Replica(identity=url, base_url=url, num_ranks=1)]
    mode = OURS[arm]
    settings = WeightSyncConfig(
        mode=mode,  # type: ignore[arg-type]
        request_timeout_s=TIMEOUT_S,
        read_in_place=arm != "send",
        bucket_bytes=bucket_bytes,
        multi_stage_wake_up=True,
        free_cache_engine=True,
    )
    transport = disaggregated_transport(
        groups=groups, settings=settings, group=SingleProcess(), device=device
    )
    notes: dict[str, Any] = {}

    def sync() -> Seconds:
        report = SyncReport(mode=mode, replica=None)
        synchronize(device.type)
        with report.stage("sync"):
            export = model.reexport() if arm in TRACED else model.export()
            asyncio.run(transport.sync(export, version="0", report=report, replicas=replicas))
            synchronize(device.type)
        notes.update(counts_of(report))
        return report.seconds

    try:
        yield sync, notes
    except Exception:
        groups.abandon()
        raise
    groups.close()


@contextmanager
def _stock(
    arm: str, url: str, device: torch.device, model: ShardedModel, bucket_bytes: int
) -> Iterator[Made]:
    """SGLang's own endpoint, one request per batch; nothing overlaps, as its users write it."""
    from verl_sglang_sync.engine.server_client import SGLangServerClient

    limit = 0 if arm == "per_tensor" else bucket_bytes
    batches = list(_batches(model.export(), limit))
    flattened = arm == "sglang_flattened"

    def sync() -> Seconds:
        synchronize(device.type)
        started = time.perf_counter()
        for batch in batches:
            reply = client.submit(
                update_from_distributed(
                    [name for name, _ in batch],
                    [str(tensor.dtype).removeprefix("torch.") for _, tensor in batch],
                    [list(tensor.shape) for _, tensor in batch],
                    group_name=arm,
                    load_format="flattened_bucket" if flattened else None,
                    flush_cache=batch is batches[-1],
                )
            )
            _broadcast(batch, group, flattened=flattened)
            reply.result()
        synchronize(device.type)
        return {"sync": time.perf_counter() - started}

    with (
        SGLangServerClient(url, timeout_s=TIMEOUT_S) as client,
        stock_group(client, arm, device) as group,
    ):
        yield sync, {"num_buckets": len(batches)}


def _broadcast(batch: Batch, group: Any, *, flattened: bool) -> None:
    if flattened:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=batch).get_flattened_tensor()
        dist.broadcast(flat, src=0, group=group)
        return
    works = [dist.broadcast(t, src=0, group=group, async_op=True) for _, t in batch]
    for work in works:
        work.wait()


def _batches(weights: Iterable[NamedTensor], limit: int) -> Iterator[Batch]:
    """Cut by bytes; a limit of 0 makes a batch of every tensor."""
    batch: Batch = []
    size = 0
    for name, tensor in weights:
        if batch and size + tensor.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield batch


if __name__ == "__main__":
    main()
