"""Two hosts on this machine: namespaces with a link between them, else loopback addresses.

A host in namespaces has its own network (IPv6, and a loopback of its own) and its own shared
memory, so what must not be shared between hosts is not. Where the machine allows no namespaces,
127.0.0.2 and 127.0.0.3 stand for hosts.
"""

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from support.forks import die_with_parent

INTERFACE = "weightsync"
KEEPER = "mount -t tmpfs weightsync /dev/shm && ip link set lo up && echo up && exec sleep infinity"


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        address: as the other one reaches it.
        prefix: of commands that shall run there; none where a loopback address stands for it.
        environment: that such commands need.
    """

    address: str
    prefix: tuple[str, ...]
    environment: dict[str, str]


def loopback() -> str:
    """The loopback address: IPv6's where this host has one."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return "127.0.0.1"
    return "::1"


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, for the length of the block; the namespaces end with their keepers."""
    keepers: list[subprocess.Popen[bytes]] = []
    try:
        try:
            keepers += [_keeper(), _keeper()]
            ends = [("name", INTERFACE, "netns", str(keeper.pid)) for keeper in keepers]
            _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            one, two = (_linked(keeper, f"fd00:77::{i + 1}") for i, keeper in enumerate(keepers))
        except (OSError, subprocess.CalledProcessError):
            one, two = (_host(f"127.0.0.{i}", (), "lo") for i in (2, 3))
        yield one, two
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait()


def _keeper() -> subprocess.Popen[bytes]:
    """The process whose namespaces are the host."""
    keeper = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", KEEPER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    assert keeper.stdout is not None
    if keeper.stdout.readline() != b"up\n":
        keeper.kill()
        raise OSError("this machine allows no namespaces")
    return keeper


def _linked(keeper: subprocess.Popen[bytes], address: str) -> Host:
    prefix = ("nsenter", "--target", str(keeper.pid), "--net", "--mount", "--")
    _run(*prefix, "ip", "address", "add", f"{address}/64", "dev", INTERFACE, "nodad")
    # No second, link-local address: gloo would take it.
    _run(*prefix, "ip", "link", "set", INTERFACE, "addrgenmode", "none")
    _run(*prefix, "ip", "link", "set", INTERFACE, "up")
    return _host(address, prefix, INTERFACE)


def _host(address: str, prefix: tuple[str, ...], interface: str) -> Host:
    environment = {"GLOO_SOCKET_IFNAME": interface, "SGLANG_HOST_IP": address}
    return Host(address, prefix, environment)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
