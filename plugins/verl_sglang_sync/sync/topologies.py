"""The two kinds of syncs: of engines on the trainer's devices, and of engines on other ones."""

from __future__ import annotations

from functools import partial

import torch

from verl_sglang_sync.config import WeightSyncConfig
from verl_sglang_sync.engine.engine_ranks import EngineServer
from verl_sglang_sync.engine.update_groups import UpdateGroups
from verl_sglang_sync.routes.broadcast import NUM_TRAVELLING
from verl_sglang_sync.routes.route import RouteContext
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.routes.table.table_route import TableRoute
from verl_sglang_sync.routes.table.transports import Exchange, Send
from verl_sglang_sync.sync.engines import ColocatedEngine, RemoteEngines
from verl_sglang_sync.sync.weight_sync import WeightSync
from verl_sglang_sync.trainer_ranks import TrainerRanks, world_size


def colocated_sync(
    *,
    engine: EngineServer | None,
    settings: WeightSyncConfig,
    ranks: TrainerRanks,
    device: torch.device,
) -> WeightSync:
    """Make the syncs of one replica, on the trainer ranks' devices.

    Args:
        engine: the replica's server on its leader. None on the other ranks.
        device: of the parameters on this rank, and of the engine rank that this rank syncs.
    """
    num_buffers = settings.num_staging_buffers
    ring = StagingRing(device, num_buffers=num_buffers, bucket_bytes=settings.bucket_bytes)
    engines = ColocatedEngine(engine, ranks, settings)
    context = RouteContext(ranks, device, settings, engines.known_ranks)
    route = TableRoute(context, engines.record, Exchange(ring, settings.request_timeout_s))
    return WeightSync(context, engines=engines, route=route, ring=ring)


def disaggregated_sync(
    *, address: str | None, settings: WeightSyncConfig, ranks: TrainerRanks, device: torch.device
) -> WeightSync:
    """Make the syncs of replicas on devices of their own.

    Args:
        address: of the host of the trainer's first rank, as the replicas reach it. None on the
            other ranks, which do not broadcast.
        device: of the staging buffers and of the update groups.
    """
    settings = settings.for_session()
    limit_s = settings.timeouts_s.get("group", settings.request_timeout_s)
    make_groups = partial(
        UpdateGroups,
        address=address or "",
        device=device,
        timeout_s=limit_s,
        transfer_s=settings.request_timeout_s,
    )
    groups: UpdateGroups | None = None
    ring: StagingRing | None = None
    if address is not None:
        groups = make_groups()
        ring = StagingRing(device, num_buffers=NUM_TRAVELLING, bucket_bytes=settings.bucket_bytes)
    engines = RemoteEngines(groups, make_groups(trainers=ranks), settings)
    # Engine ranks are numbered after the trainer's ranks, with which they form a group.
    first_reader = world_size()
    context = RouteContext(ranks, device, settings, engines.known_ranks, first_reader)
    send = Send(engines.sending_group, ranks.poll, settings.request_timeout_s, device)
    route = engines.route = TableRoute(context, engines.record, send)
    return WeightSync(context, engines=engines, route=route, ring=ring)
