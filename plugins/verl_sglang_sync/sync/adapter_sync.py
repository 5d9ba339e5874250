"""A LoRA adapter that engines serve as such: replaced whole at every sync, their weights stay."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from verl_sglang_sync.collective import (
    TrainerGroup,
    WeightSyncError,
    common_reason,
    result_or_reason,
    run_in_step,
)
from verl_sglang_sync.engine.engine_ranks import Engine
from verl_sglang_sync.engine.server_client.operations import Call
from verl_sglang_sync.report import SyncReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AdapterUpdate:
    """Another state of the adapter: `unload` ends the one before, `load` brings this one, under the
    same name.
    """

    unload: Call
    load: Call
    num_tensors: int
    nbytes: int


Step: TypeAlias = Callable[[Engine, AdapterUpdate], Awaitable[None]]


class AdapterSync:
    """Replaces the adapter of engines; lives in every trainer rank, for all its syncs."""

    def __init__(self, group: TrainerGroup) -> None:
        self._group = group
        self._were_told: set[str] = set()  # engines that may serve an adapter

    async def sync(
        self,
        collect: Callable[[], AdapterUpdate],
        engines: Mapping[str, Engine],
        report: SyncReport,
    ) -> None:
        """Have engines serve another state of the adapter; collective.

        Args:
            collect: goes through the export, which is collective over the trainer's ranks.
            engines: those that this rank talks to, if any, by a name that a restarted one has not.

        Raises:
            WeightSyncError: on every rank, if any rank failed; each engine then serves this state,
                that before, or none.
        """
        with report.stage("export"):
            adapter, reason = result_or_reason(collect)
        if reason := common_reason(self._group, reason):
            raise WeightSyncError(f"the adapter was not exported\n{reason}")
        assert adapter is not None, "no rank has failed"

        for stage, step, names in (
            ("unload_adapter", _unload, self._were_told & engines.keys()),
            ("load_adapter", _load, set(engines)),
        ):
            work = None
            if names:
                work = _on_each(step, [engines[name] for name in names], adapter, report, stage)
                self._were_told |= names
            await run_in_step(self._group, stage, work)
        report.count_bucket(adapter.num_tensors, adapter.nbytes)
        report.sent_bytes += adapter.nbytes


async def _on_each(
    step: Step, engines: Iterable[Engine], adapter: AdapterUpdate, report: SyncReport, stage: str
) -> None:
    """Raises the first failure, once all have answered."""
    with report.stage(stage):
        steps = [step(engine, adapter) for engine in engines]
        outcomes = await asyncio.gather(*steps, return_exceptions=True)
    for error in filter(None, outcomes):
        raise error


async def _unload(engine: Engine, adapter: AdapterUpdate) -> None:
    """An engine that serves none refuses; where it does serve one, it refuses the next instead."""
    try:
        await asyncio.wrap_future(engine.submit(adapter.unload))
    except Exception as error:
        logger.info("the adapter before was not unloaded: %s", error)


async def _load(engine: Engine, adapter: AdapterUpdate) -> None:
    await asyncio.wrap_future(engine.submit(adapter.load))
