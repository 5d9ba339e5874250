"""Two hosts on this machine: network namespaces with a link between them, else loopback addresses.

Namespaces have addresses (IPv6) and loopbacks of their own, so what listens on one host's loopback
is not there on the other. Where the machine allows none, 127.0.0.2 and 127.0.0.3 stand for them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

INTERFACE = "weightsync"


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        address: as the other one reaches it.
        prefix: of commands that shall run there.
        environment: that such commands need.
    """

    address: str
    prefix: tuple[str, ...]
    environment: dict[str, str]

    @property
    def is_namespace(self) -> bool:
        """False where a loopback address stands for the host."""
        return bool(self.prefix)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, for the length of the block."""
    names = [f"weightsync-{os.getpid()}-{side}" for side in "ab"]
    try:
        try:
            _connect(names)
            one, two = (_namespace(name, f"fd00:77::{i + 1}") for i, name in enumerate(names))
        except (OSError, subprocess.CalledProcessError):
            one, two = (Host(f"127.0.0.{i}", (), {"GLOO_SOCKET_IFNAME": "lo"}) for i in (2, 3))
        yield one, two
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _connect(names: list[str]) -> None:
    for name in names:
        _ip("netns", "add", name)
    ends = [("name", INTERFACE, "netns", name) for name in names]
    _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])


def _namespace(name: str, address: str) -> Host:
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "address", "add", f"{address}/64", "dev", INTERFACE, "nodad")
    _ip("-n", name, "link", "set", INTERFACE, "addrgenmode", "none")  # no second address
    _ip("-n", name, "link", "set", INTERFACE, "up")
    prefix = ("ip", "netns", "exec", name)
    return Host(address, prefix, {"GLOO_SOCKET_IFNAME": INTERFACE})


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)
