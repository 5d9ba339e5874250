"""Base URLs of servers, from names and IPv4 or IPv6 addresses, or as a user wrote them."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def server_url(host: str, port: int) -> str:
    """Base URL of the HTTP server at a name or an address, an IPv6 one in brackets or not:
    "http://10.0.0.1:30000", "http://[::1]:30000".
    """
    bare = host.removeprefix("[").removesuffix("]")
    return f"http://[{bare}]:{port}" if _is_ipv6(bare) else f"http://{host}:{port}"


def checked_base_url(key: str, value: object) -> str:
    """The base URL that a user gave, without a slash at its end.

    Raises:
        ValueError: it is no such URL; the message names the key, the value and what is allowed.
    """
    allowed = "expected a URL such as http://10.0.0.1:30000 or https://[::1]:30000"
    if not isinstance(value, str):
        raise ValueError(f"{key}={value!r}: {allowed}")
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{key}={value!r}: {error}; {allowed}") from None
    usable = parts.scheme in ("http", "https") and parts.hostname and port != 0
    if not usable or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{key}={value!r}: {allowed}")
    return value.rstrip("/")


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
