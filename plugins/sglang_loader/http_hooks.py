"""What the hook on SGLang's launch does in the process that will serve HTTP (sglang 0.5.14)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sglang_loader.idempotency import install
from sglang_loader.memory_hooks import is_ours

HTTP_SERVER = "sglang.srt.entrypoints.http_server"


def launch_with_idempotency(
    original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `Engine._launch_subprocesses`: updates with a key then run at most once.

    An engine without HTTP has not imported the module of the server. The middleware must come
    before SGLang's own check of API keys, which it adds after this, on the outside.
    """
    arguments = kwargs["server_args"] if "server_args" in kwargs else args[0]
    if is_ours(arguments) and HTTP_SERVER in sys.modules:
        install(sys.modules[HTTP_SERVER].app)
    return original(cls, *args, **kwargs)
