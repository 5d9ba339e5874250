"""Registers a rollout server with the router of `router_url` while its process lives."""

from __future__ import annotations

import logging
import os
from typing import IO

from verl_sglang_sync.http_settings import KEY_VARIABLE
from verl_sglang_sync.router.client import RouterClient
from verl_sglang_sync.router.guard import GuardedWorker, start_guard

logger = logging.getLogger(__name__)


def register(
    router_url: str, server_url: str, *, api_key: str | None, timeout_s: float
) -> IO[bytes]:
    """Add a server to the router's workers, and start the guard that removes it.

    Args:
        api_key: the server's key. The router's own key comes from `KEY_VARIABLE`.

    Returns:
        The guard's pipe. The server is removed when the pipe is closed or this process ends.

    Raises:
        RouterError: the router did not add the server.
    """
    router_key = os.environ.get(KEY_VARIABLE) or None
    router = RouterClient(router_url, timeout_s=timeout_s, api_key=router_key)
    worker = router.add(server_url, api_key=api_key)
    pipe = start_guard(
        GuardedWorker(router_url=router_url, router_api_key=router_key, worker=worker)
    )
    logger.info("router %s sends requests to %s", router_url, worker.url)
    return pipe
