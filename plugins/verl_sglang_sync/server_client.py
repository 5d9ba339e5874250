"""Async HTTP client for the few control endpoints of an SGLang server that a weight sync needs.

Every operation either succeeded on the server or raised `ServerError` naming endpoint, status and
the server's message. Only a refused connection is tried again: nothing was executed then. A request
that timed out may have been executed, so it is never repeated.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import aiohttp

CONNECT_ATTEMPTS = 3
CONNECT_RETRY_DELAY_S = 1.0
MESSAGE_CHARS = 4000


class ServerError(RuntimeError):
    """The SGLang server refused, failed or did not answer a control request."""


class SGLangServerClient:
    """Talks to one SGLang HTTP server.

    Args:
        base_url: such as "http://10.0.0.1:30000" or "http://[::1]:30000".
        timeout_s: limit of one request, in seconds.
        api_key: sent as a bearer token; SGLang's `admin_api_key` or `api_key`.
    """

    def __init__(self, base_url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Free the engine's memory of `tags` ("kv_cache", "weights", "cuda_graph")."""
        await self._post("release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Map the engine's memory of `tags` again; weights come back with undefined content."""
        await self._post("resume_memory_occupation", {"tags": list(tags)})

    async def update_weights(
        self,
        handles: Sequence[bytes],
        *,
        load_format: str,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Load one bucket; with the last one, drop the prefix cache and publish the version.

        Args:
            handles: one entry per TP rank, made by `sglang_loader.ipc.serialize_handles`.
            load_format: dotted path of the loader in the engine.
            flush_cache: drop the prefix cache once the bucket is loaded; fails where requests run.
            weight_version: what `/model_info` reports from then on; None leaves it as it is.
        """
        payload = {
            "serialized_named_tensors": [base64.b64encode(item).decode() for item in handles],
            "load_format": load_format,
            "flush_cache": flush_cache,
            "weight_version": weight_version,
        }
        await self._post("update_weights_from_tensor", payload)

    async def _post(self, endpoint: str, payload: dict[str, Any]) -> None:
        url = f"{self._base_url}/{endpoint}"
        for attempt in range(1, CONNECT_ATTEMPTS + 1):
            try:
                return await self._post_once(url, payload)
            except aiohttp.ClientConnectorError as error:
                if attempt == CONNECT_ATTEMPTS:
                    raise ServerError(
                        f"{url}: no connection in {attempt} attempts: {error}"
                    ) from None
                await asyncio.sleep(CONNECT_RETRY_DELAY_S)
            except TimeoutError:
                raise ServerError(f"{url}: no reply within {self._timeout_s:g} s") from None
            except aiohttp.ClientError as error:
                raise ServerError(f"{url}: the connection broke: {error!r}") from None

    async def _post_once(self, url: str, payload: dict[str, Any]) -> None:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
            session.post(url, json=payload) as response,
        ):
            text = await response.text(errors="replace")
            if response.status >= 400:
                raise ServerError(f"{url}: HTTP {response.status}: {text[:MESSAGE_CHARS]}")
