"""One end of a session's socket: typed messages, bounded waits, and notice of the peer's death.

The socket is a zmq PAIR. The trainer binds in a folder that only its user may enter (`ipc://`), or
for an engine on another host at a free port (`tcp://`). The engine connects. A monitor on the
socket reports at once that the peer's process is gone, also across PID namespaces. The report is
late if a child that the process has forked keeps its end open.

The trainer still reads the last messages of a dead engine, which have the reason of the failure.
The engine must not act on messages of a trainer that has given up since. So on the engine's end an
Abort overtakes the messages that wait, and these are dropped once the trainer is gone.
"""

from __future__ import annotations

import hmac
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from sglang_loader.common.session import messages
from sglang_loader.common.session.folder import checked_address
from sglang_loader.common.session.messages import FromEngine, FromTrainer, PeerLost, SessionError

LINGER_MS = 2000
POLL_MS = 100
CONNECT_TIMEOUT_S = 5.0
GRACE_MS = 1000
NEVER_MS = 24 * 3600 * 1000
"""Delay of a reconnection. None must happen: another trainer may have got the same port. zmq's own
"never" would also drop messages that have come before.
"""

Received = TypeVar("Received", bound=FromTrainer | FromEngine)


class Channel(Generic[Received]):
    """One end of a session's connection. A context manager. The trainer's end binds.

    Args:
        endpoint: zmq address of the session.
        bind: True for the trainer's end.
        address: another address of the same endpoint, for the engine's end.

    Attributes:
        has_heard: the peer has sent something, even if it was refused.
    """

    def __init__(self, endpoint: str, *, bind: bool, address: str | None = None) -> None:
        self.endpoint = endpoint
        self._bind = bind
        self._token = ""
        self._timeout_s = 0.0
        self._decoder: Any = messages.FROM_ENGINE if bind else messages.FROM_TRAINER
        self._peer = "engine" if bind else "trainer"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a send never waits for the peer to read
        self._socket.setsockopt(zmq.IPV6, 1)  # and IPv4
        self._received: deque[Received] = deque()
        self._is_peer_gone = False
        self._has_peer = False  # on the trainer's end, also if the peer has left since
        self.has_heard = False
        self._connect_deadline: float | None = None  # None: connected, or the trainer's end
        events = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
        events |= zmq.EVENT_ACCEPTED
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(events)
        is_file = bind and endpoint.startswith("ipc://")
        path = Path(endpoint.removeprefix("ipc://")) if is_file else None
        self._close = weakref.finalize(self, _close, self._socket, self._monitor, path, os.getpid())
        self._close.atexit = False
        try:
            if bind:
                self._socket.bind(endpoint)
            else:
                # zmq connects in the background and reports the result to the monitor.
                self._connect_deadline = time.monotonic() + CONNECT_TIMEOUT_S
                self._socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
                self._socket.connect(address or endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise SessionError(f"{endpoint}: {error}") from None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def begin(self, token: str, *, timeout_s: float) -> None:
        """Begin the session.

        Args:
            token: the session's token, which each message sent or received must have.
            timeout_s: longest time that a wait for a message may take, in seconds.
        """
        self._token, self._timeout_s = token, timeout_s

    @property
    def is_peer_gone(self) -> bool:
        """True if the peer has closed its end, or is dead."""
        self._look_at_peer()
        return self._is_peer_gone

    @property
    def is_untouched(self) -> bool:
        """True if the trainer's end in a folder can be found, no peer has come, and it works."""
        try:
            self._look_at_peer()
        except zmq.ZMQError:  # somebody has destroyed the context, which the process shares
            return False
        return not self._has_peer and Path(self.endpoint.removeprefix("ipc://")).is_socket()

    @property
    def bound_to(self) -> str:
        """The address that the socket was bound to."""
        return self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]

    def send(self, kind: type[Any], **fields: Any) -> None:
        """Send `kind(**fields)` with the session's token, without waiting.

        Raises:
            SessionError: there is no peer.
        """
        self._look_at_peer()  # the monitor may be a millisecond faster than the socket
        try:
            if self._is_peer_gone:
                raise zmq.Again
            self._socket.send(messages.encode(kind(token=self._token, **fields)), zmq.NOBLOCK)
        except zmq.Again:
            raise PeerLost(f"{kind.__name__} was not sent: the {self._peer} is gone") from None

    def receive(self, *, watch: Callable[[], None] | None = None) -> Received:
        """Return the peer's next message.

        Args:
            watch: called every `POLL_MS`. May end the wait by raising.

        Raises:
            SessionError: silence, a dead peer, a wrong token or version, or not a message.
        """
        if not self.wait(self._timeout_s, watch):
            raise PeerLost(f"no message from the {self._peer} within {self._timeout_s:g} s")
        return self._received.popleft()

    def wait(self, limit_s: float, watch: Callable[[], None] | None = None) -> bool:
        """Wait for a message. Return False if there is none after `limit_s`.

        Args:
            watch: as for `receive`.

        Raises:
            SessionError: a dead peer, or as for `receive`.
        """
        deadline = time.monotonic() + limit_s
        while not self.has_message():
            # `has_message` came first: the trainer still reads a dead engine's last messages.
            if self._is_peer_gone:
                raise PeerLost(f"the {self._peer}'s process is gone")
            if watch is not None:
                try:
                    watch()
                except Exception:
                    # A message that the peer sent earlier explains more than this error.
                    if self._socket.poll(GRACE_MS) and self.has_message():
                        return True
                    raise
            self._check_listener()
            if time.monotonic() > deadline:
                return False
            self._poller.poll(POLL_MS)
        return True

    def wait_briefly(self) -> None:
        """Wait up to `POLL_MS` for a message or an event of the monitor."""
        if not self.has_message():
            self._poller.poll(POLL_MS)

    def has_message(self) -> bool:
        """Return True if `receive` would return at once.

        Raises:
            SessionError: a wrong token or version, not a message, or on the engine's end a dead
                peer.
        """
        self._look_at_peer()
        while self._socket.poll(0):
            data = self._socket.recv()
            self.has_heard = True
            message = self._checked(data)
            if isinstance(message, messages.Abort):  # overtakes all messages that wait
                self._received.appendleft(message)
            else:
                self._received.append(message)
        is_aborted = bool(self._received) and isinstance(self._received[0], messages.Abort)
        if self._is_peer_gone and not self._bind and not is_aborted:
            raise PeerLost(f"the {self._peer}'s process is gone")
        return bool(self._received)

    def wait_connected(self) -> None:
        """Wait until the engine's end is connected.

        Raises:
            SessionError: no process listens at the endpoint.
        """
        self._look_at_peer()
        while self._connect_deadline is not None:
            self._check_listener()
            self._monitor.poll(POLL_MS)
            self._look_at_peer()

    def _check_listener(self) -> None:
        if self._connect_deadline is not None and time.monotonic() > self._connect_deadline:
            raise SessionError(f"nobody listens at {self.endpoint}")

    def _look_at_peer(self) -> None:
        """Process the monitor's events."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                self._connect_deadline = None
            elif event == zmq.EVENT_ACCEPTED:
                self._has_peer = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._is_peer_gone = True
            elif self._connect_deadline is not None:  # refused, and never tried again
                self._connect_deadline = 0.0

    def _checked(self, data: bytes) -> Received:
        message: Received = messages.decode(self._decoder, data)
        messages.check_version(message.version)
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            raise SessionError(f"a message of the {self._peer} has a wrong token: refused")
        return message

    def close(self) -> None:
        """Close the socket. zmq goes on sending for up to `LINGER_MS`."""
        self._close()

    def __enter__(self) -> Channel[Received]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(
    socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], bound_at: Path | None, owner: int
) -> None:
    """Close the sockets, also of a channel that was never closed."""
    # In a forked child they still belong to the owner. A destroyed context has closed them.
    if os.getpid() != owner or socket.closed:
        return
    # In this order: an event for a monitor that is closed first would block zmq's thread, and every
    # socket of the process, for ever.
    socket.disable_monitor()
    socket.close()
    monitor.close()
    if bound_at is not None:
        bound_at.unlink(missing_ok=True)


def trainer_end(endpoint: str) -> Channel[FromEngine]:
    """Bind a new socket. `endpoint` is a free zmq address."""
    return Channel(endpoint, bind=True)


def trainer_end_on_network(host: str) -> Channel[FromEngine]:
    """Bind a new socket at a free port of all interfaces. `host`: this host's name for engines."""
    channel = trainer_end("tcp://*:*")
    port = channel.bound_to.rpartition(":")[2]
    channel.endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return channel


def engine_end(
    endpoint: str, *, is_signed: bool = False, meanwhile: Callable[[], None] | None = None
) -> Channel[FromTrainer]:
    """Connect to a trainer's socket, on another host only if the descriptor `is_signed`.

    Args:
        meanwhile: called while zmq connects.

    Raises:
        SessionError: the address is not allowed, or no process listens there.
        Exception: what `meanwhile` raises.
    """
    is_checked = not (is_signed and endpoint.startswith("tcp://"))
    with checked_address(endpoint) if is_checked else nullcontext(endpoint) as address:
        channel: Channel[FromTrainer] = Channel(endpoint, bind=False, address=address)
        try:
            try:
                if meanwhile is not None:
                    meanwhile()
            finally:
                # zmq connects in a thread. A checked address is the trainer's only in this body.
                if is_checked:
                    channel.wait_connected()
        except BaseException:
            channel.close()
            raise
    return channel
