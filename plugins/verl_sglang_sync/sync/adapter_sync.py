"""A LoRA adapter that engines serve as such: replaced whole at every sync, their weights stay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class AdapterUpdate:
    """Another state of the adapter.

    Attributes:
        unload: ends the one before.
        load: brings this one, under the same name.
        num_tensors: of it.
        nbytes: of them.
    """

    unload: Call
    load: Call
    num_tensors: int
    nbytes: int


class AdapterSync:
    """Which engines serve an adapter; lives in every trainer rank, for all its syncs.

    Args:
        group: the trainer's ranks.
    """

    def __init__(self, group: TrainerGroup) -> None:
        self._group = group
        self._serving: set[str] = set()

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
            report: gets the counts and seconds.

        Raises:
            WeightSyncError: on every rank, if any rank failed; an engine then serves the adapter
                as it was, or, where it refuses the new one, none.
        """
        with report.stage("export"):
            adapter, reason = result_or_reason(collect)
        if reason := common_reason(self._group, reason):
            raise WeightSyncError(f"the adapter was not exported\n{reason}")
        assert adapter is not None, "no rank has failed"

        async def unload(name: str) -> None:
            await asyncio.wrap_future(engines[name].submit(adapter.unload))
            self._serving.discard(name)

        async def load(name: str) -> None:
            await asyncio.wrap_future(engines[name].submit(adapter.load))
            self._serving.add(name)

        async def on_each(step: Callable[[str], Awaitable[None]], names: set[str]) -> None:
            with report.stage(f"{step.__name__}_adapter"):
                outcomes = await asyncio.gather(*map(step, names), return_exceptions=True)
            for error in filter(None, outcomes):  # once it is known which engines serve what
                raise error

        for step, names in ((unload, self._serving & engines.keys()), (load, set(engines))):
            work = on_each(step, names) if names else None
            await run_in_step(self._group, f"{step.__name__}_adapter", work)
        report.count_bucket(adapter.num_tensors, adapter.nbytes)
        report.sent_bytes += adapter.nbytes
