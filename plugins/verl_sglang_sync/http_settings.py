"""Settings of HTTP requests: time limits, base URLs, and the router's key.

This module must not import torch, because the router's guard, a process of its own, imports it.
"""

from __future__ import annotations

from typing import Literal, get_args
from urllib.parse import urlsplit

Limit = Literal["update", "release", "resume", "group", "info"]
LIMITS: tuple[str, ...] = get_args(Limit)
"""Kinds of operations that have a time limit of their own (`timeouts_s`)."""

KEY_VARIABLE = "VERL_SGLANG_SYNC_ROUTER_API_KEY"
"""Environment variable with the router's own key, in the processes that launch servers."""


def server_url(host: str, port: int) -> str:
    """Return the base URL of a host name or address. An IPv6 address may have brackets."""
    # Only an IPv6 address has colons. It needs brackets.
    bare = host.removeprefix("[").removesuffix("]")
    return f"http://[{bare}]:{port}" if ":" in bare else f"http://{host}:{port}"


def checked_base_url(key: str, value: object) -> str:
    """Check a user's base URL, and return it without a slash at the end.

    Raises:
        ValueError: names the key, the value and what is allowed.
    """
    allowed = "expected a URL such as http://10.0.0.1:30000 or https://[::1]:30000"
    if not isinstance(value, str):
        raise ValueError(f"{key}={value!r}: {allowed}")
    try:
        parts = urlsplit(value)
        port = parts.port  # raises if the port is no number
    except ValueError as error:
        raise ValueError(f"{key}={value!r}: {error}, {allowed}") from None
    usable = parts.scheme in ("http", "https") and parts.hostname and port != 0
    usable = usable and not any(map(str.isspace, value))
    if not usable or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{key}={value!r}: {allowed}")
    return value.rstrip("/")
