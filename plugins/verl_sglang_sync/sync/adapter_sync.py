"""Syncs of a LoRA adapter that engines serve unmerged: each sync replaces only the adapter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from verl_sglang_sync.engine.engine_ranks import EngineServer
from verl_sglang_sync.engine.server_client.operations import Call
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.trainer_ranks import TrainerRanks, WeightSyncError, run_on_all

logger = logging.getLogger(__name__)

UNLOAD = "unload_adapter"


@dataclass(frozen=True, kw_only=True)
class AdapterUpdate:
    """A new state of the adapter, as two requests: to unload the old state, and to load this one.

    Attributes:
        refusal: the reason why engines would serve another policy, or None.
    """

    unload: Call
    load: Call
    num_tensors: int
    nbytes: int
    refusal: str | None = None


class AdapterRefused(RuntimeError):
    """Engines would serve another policy than the adapter is."""


class AdapterSync:
    """All syncs of an adapter. Every trainer rank has one such object."""

    def __init__(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks
        self._with_adapter: set[str] = set()  # engines that may serve an adapter already

    async def sync(
        self,
        collect: Callable[[], AdapterUpdate],
        engines: Mapping[str, EngineServer],
        report: SyncReport,
    ) -> None:
        """Replace the adapter of all engines. Collective.

        Args:
            collect: reads the export, which is collective over the trainer's ranks.
            engines: this rank's engines, if any, by a name that changes with a restart.

        Raises:
            WeightSyncError: on every rank, if any rank failed. Each engine then serves the new
                state, the old state, or no adapter. After a refusal no engine was sent anything.
        """

        def collected() -> AdapterUpdate:
            with report.stage("export"):
                adapter = collect()
            if adapter.refusal is not None:
                raise AdapterRefused(adapter.refusal)
            return adapter

        with self._ranks.section():
            adapter, reason = self._ranks.step(collected, AdapterRefused)
            if adapter is None:
                raise WeightSyncError(f"the LoRA adapter was not exported\n{reason}")

        for stage, call, names in (
            (UNLOAD, adapter.unload, self._with_adapter & engines.keys()),
            ("load_adapter", adapter.load, set(engines)),
        ):
            work = None
            if names:
                work = _on_each([engines[name] for name in names], call, report, stage)
                # Noted before the request: after a lost reply an engine may serve the adapter.
                self._with_adapter |= names
            await run_on_all(self._ranks, stage, work)
        report.count_bucket(adapter.num_tensors, adapter.nbytes)
        report.sent_bytes += adapter.nbytes


async def _on_each(
    engines: Iterable[EngineServer], call: Call, report: SyncReport, stage: str
) -> None:
    """Send a request to all engines. Raise the first failure when all engines have answered."""
    with report.stage(stage):
        replies = [asyncio.wrap_future(engine.submit(call)) for engine in engines]
        outcomes = await asyncio.gather(*replies, return_exceptions=True)
    for outcome in outcomes:
        # An engine without an adapter refuses to unload. An engine that still serves an adapter
        # refuses to load the next one.
        if stage == UNLOAD and isinstance(outcome, Exception):
            logger.info("the last LoRA adapter was not unloaded: %s", outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
