"""HTTP clients of an SGLang server's control endpoints, asynchronous and synchronous.

async with SGLangServerClient("http://[::1]:30000", timeout_s=600) as client:
    await client.release_memory(["kv_cache", "weights"])

with SyncSGLangServerClient("http://10.0.0.1:30000", timeout_s=600) as client:
    client.run(operations.release_memory(["kv_cache", "weights"]))
"""

from verl_sglang_sync.engine.server_client.client import SGLangServerClient, SyncSGLangServerClient
from verl_sglang_sync.engine.server_client.errors import (
    ConnectionBroken,
    NoReply,
    NotAuthorized,
    ReplyLost,
    RequestFailed,
    RouterError,
    ServerError,
    ServerUnreachable,
)

__all__ = [
    "ConnectionBroken",
    "NoReply",
    "NotAuthorized",
    "ReplyLost",
    "RequestFailed",
    "RouterError",
    "SGLangServerClient",
    "ServerError",
    "ServerUnreachable",
    "SyncSGLangServerClient",
]
