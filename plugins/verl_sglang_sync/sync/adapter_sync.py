"""Syncs of a LoRA adapter that engines serve unmerged: each sync replaces only the adapter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from verl_sglang_sync.collective import (
    Reason,
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

UNLOAD = "unload_adapter"


@dataclass(frozen=True, kw_only=True)
class AdapterUpdate:
    """A new state of the adapter: the requests that unload the old one and load this one.

    Attributes:
        refusal: why engines would serve another policy than this one; None: they serve it.
    """

    unload: Call
    load: Call
    num_tensors: int
    nbytes: int
    refusal: str | None = None


class AdapterSync:
    """Replaces the adapter of engines. Every trainer rank has one such object for all syncs."""

    def __init__(self, group: TrainerGroup) -> None:
        self._group = group
        self._with_adapter: set[str] = set()  # engines that may serve an adapter already

    async def sync(
        self,
        collect: Callable[[], AdapterUpdate],
        engines: Mapping[str, Engine],
        report: SyncReport,
    ) -> None:
        """Have engines serve a new state of the adapter; collective.

        Args:
            collect: reads the export, which is collective over the trainer's ranks.
            engines: this rank's engines, if any, by a name that changes with a restart.

        Raises:
            WeightSyncError: on every rank, if any rank failed; each engine then serves the new
                state, the old one, or no adapter. After a refusal no engine was sent anything.
        """
        with report.stage("export"):
            adapter, reason = result_or_reason(collect)
        if adapter is not None and adapter.refusal is not None:
            reason = Reason(adapter.refusal, is_final=True)
        if reason := common_reason(self._group, reason):
            raise WeightSyncError(f"the LoRA adapter was not exported\n{reason}")
        assert adapter is not None, "no rank has failed"

        for stage, call, names in (
            (UNLOAD, adapter.unload, self._with_adapter & engines.keys()),
            ("load_adapter", adapter.load, set(engines)),
        ):
            work = None
            if names:
                work = _on_each([engines[name] for name in names], call, report, stage)
                self._with_adapter |= names
            await run_in_step(self._group, stage, work)
        report.count_bucket(adapter.num_tensors, adapter.nbytes)
        report.sent_bytes += adapter.nbytes


async def _on_each(engines: Iterable[Engine], call: Call, report: SyncReport, stage: str) -> None:
    """Send a request to all engines; raises the first failure when all have answered.

    Failures to unload are only logged: an engine without an adapter refuses that, and one that
    still serves an adapter refuses to load the next one.
    """

    with report.stage(stage):
        replies = [asyncio.wrap_future(engine.submit(call)) for engine in engines]
        outcomes = await asyncio.gather(*replies, return_exceptions=True)
    for outcome in outcomes:
        if stage == UNLOAD and isinstance(outcome, Exception):
            logger.info("the last LoRA adapter was not unloaded: %s", outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
