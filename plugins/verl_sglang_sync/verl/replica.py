"""verl's replica and server for rollout name "sglang". They launch the engine with our loaders.

Without a `+weight_sync` preset replica and server are verl's own, launched with verl's arguments.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from typing import IO, Any

import ray
from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica

from sglang_loader.common.engine_settings import (
    GRAPHS_VARIABLE,
    HOST_BACKUP_VARIABLE,
    REQUESTS_TAG,
    STALE_REQUESTS_VARIABLE,
    TAKEN_BY_TRAINER,
)
from sglang_loader.common.replies import StageCosts
from sglang_loader.common.session.messages import SESSION_FORMAT
from verl_sglang_sync.config import DISAGGREGATED_BACKEND, WeightSyncConfig
from verl_sglang_sync.http_settings import server_url
from verl_sglang_sync.router.registration import register
from verl_sglang_sync.verl.step_metrics import show_metrics_in_steps
from verl_sglang_sync.verl.upstream import (
    end_pause,
    is_abort,
    list_server_arguments,
    log_without_flush,
    pause_by_aborting,
)
from verl_sglang_sync.verl.weight_versions import report_weight_versions

logger = logging.getLogger(__name__)

# SGLang answers GET /health by generating a token, unless this variable is "false". A router sends
# that request over and over, and an engine that sleeps has no memory to generate with.
HEALTH_GENERATES = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"


class WeightSyncHttpServer(SGLangHttpServer):  # type: ignore[misc]
    """Ray actor around one SGLang server, with our loaders, costs of sleep, and the router."""

    _last_sleep: tuple[float, StageCosts | None] | None = None
    _router_guard: IO[bytes] | None = None  # closed with this process
    _metrics: dict[str, float] | None = None
    _refuses_requests = False

    async def launch_server(
        self, master_address: str | None = None, master_port: int | None = None
    ) -> None:
        """Launch SGLang as verl does, with our weight loader and our settings."""
        self._register_loaders()
        settings = self._settings
        # SGLang's processes inherit these.
        os.environ[HOST_BACKUP_VARIABLE] = settings.host_backup
        os.environ[STALE_REQUESTS_VARIABLE] = str(settings.stale_requests_timeout_s)
        if settings.release_cuda_graphs:
            os.environ[GRAPHS_VARIABLE] = "true"
        if settings.router_url is not None:
            os.environ[HEALTH_GENERATES] = "false"
        list_server_arguments()
        await super().launch_server(master_address, master_port)
        if settings.router_url is not None and self.node_rank == 0:
            sglang_kwargs = (self.config.engine_kwargs or {}).get("sglang") or {}
            self._router_guard = await asyncio.to_thread(
                register,
                settings.router_url,
                server_url(*self.get_server_address()),
                api_key=sglang_kwargs.get("api_key"),
                timeout_s=settings.request_timeout_s,
            )

    async def sleep(self) -> None:
        """Release the engine's memory, and keep the costs for `take_sleep_costs`."""
        started, costs = time.perf_counter(), None
        if self._sleeps_in_order:
            request = ReleaseMemoryOccupationReqInput(tags=list(self._settings.stages.sleep))
            # Our hook returns the costs, see `sglang_loader.hooks.http`.
            costs = await self.tokenizer_manager.release_memory_occupation(request, None)
        else:
            await super().sleep()
        self._last_sleep = time.perf_counter() - started, costs

    async def take_sleep_costs(self) -> tuple[float, StageCosts | None] | None:
        """Return the seconds and costs of the last sleep, or None if they were taken before."""
        sleep, self._last_sleep = self._last_sleep, None
        return sleep

    async def abort_all_requests(self) -> None:
        """Abort all requests and let none begin. Clients send aborted requests again later."""
        if self.node_rank == 0:
            limit_s = self._settings.request_timeout_s
            await pause_by_aborting(self.tokenizer_manager, timeout_s=limit_s)
            await self._accept_requests()

    async def refuse_requests(self) -> None:
        """Refuse all requests at once until generation is resumed, and end a pause."""
        if self.node_rank == 0:
            self._refuses_requests = True
            request = ReleaseMemoryOccupationReqInput(tags=[REQUESTS_TAG])
            await self.tokenizer_manager.release_memory_occupation(request, None)
            await end_pause(self.tokenizer_manager)  # the requests that wait are refused, too

    async def resume_generation(self) -> None:
        """Accept requests again, as verl does."""
        await self._accept_requests()
        await super().resume_generation()

    async def _accept_requests(self) -> None:
        if self._refuses_requests:
            request = ResumeMemoryOccupationReqInput(tags=[REQUESTS_TAG])
            await self.tokenizer_manager.resume_memory_occupation(request, None)
            self._refuses_requests = False

    @functools.wraps(SGLangHttpServer.generate)
    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """Generate as verl does, but return no tokens for a request that was aborted or refused."""
        try:
            return await super().generate(*args, **kwargs)
        except Exception as error:
            # A request is refused if the trainer has taken this engine, and aborted before it ran.
            is_refused = TAKEN_BY_TRAINER in str(getattr(error, "detail", ""))
            # verl's clients continue such a request, with another server if this one refused it.
            # They would fail at the error.
            if not is_refused and not is_abort(error):
                raise
            # A refused request has no version: this engine's weights may be many steps old.
            version = {"global_steps": None if is_refused else self.global_steps}
            return TokenOutput(
                token_ids=[], log_probs=[], stop_reason="abort", extra_fields=version
            )

    async def keep_metrics(self, metrics: dict[str, float]) -> None:
        """Keep the metrics of this replica's last sync for the trainer."""
        self._metrics = metrics

    async def take_metrics(self) -> dict[str, float] | None:
        """Return the metrics of the last sync, or None if they were taken before."""
        metrics, self._metrics = self._metrics, None
        return metrics

    @property
    def _sleeps_in_order(self) -> bool:
        """True if the settings' order applies: for a hybrid engine, whose weights sleep, too."""
        return bool(
            self.node_rank == 0
            and self.config.free_cache_engine
            and self.rollout_mode == RolloutMode.HYBRID
            and not self.lora_as_adapter
        )

    @property
    def _settings(self) -> WeightSyncConfig:
        settings = WeightSyncConfig.from_rollout(self.config)
        assert settings is not None, "launched only where a preset is chosen"
        return settings

    def _register_loaders(self) -> None:
        engine_kwargs = dict(self.config.engine_kwargs or {})
        sglang_kwargs = dict(engine_kwargs.get("sglang") or {})
        users = list(sglang_kwargs.get("custom_weight_loader") or [])
        if SESSION_FORMAT not in users:
            sglang_kwargs["custom_weight_loader"] = [*users, SESSION_FORMAT]
        self.config.engine_kwargs = {**engine_kwargs, "sglang": sglang_kwargs}


class WeightSyncReplica(SGLangReplica):  # type: ignore[misc]
    """verl's replica, which launches `WeightSyncHttpServer` if a preset is chosen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if WeightSyncConfig.from_rollout(self.config) is not None:
            self.server_class = ray.remote(WeightSyncHttpServer)
            show_metrics_in_steps()
            log_without_flush()
            if self.config.checkpoint_engine.backend == DISAGGREGATED_BACKEND:
                report_weight_versions()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Pause generation as verl does.

        Args:
            reject_request: True if no resume follows soon. Requests are then refused at once, which
                verl's own replica cannot do.
        """
        is_ours = WeightSyncConfig.from_rollout(self.config) is not None
        if reject_request and not is_ours:
            await super().abort_all_requests(reject_request)
            return
        await super().abort_all_requests()  # the one argument came with verl 0.9.1
        if reject_request:
            await self.servers[0].refuse_requests.remote()
