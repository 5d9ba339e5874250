"""What goes over the wire during a storm: recorded, replayed, mutated and forged.

A `Wire` sees every request that passes the fault proxy. While it is told to tamper, it also stands
between each trainer rank's session socket and its engine rank. Nothing here knows the messages: a
session is opened by base64 of JSON with an `endpoint`, a frame is bytes, or any msgpack.
"""

import base64
import contextlib
import itertools
import json
import random
import socket
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

NUM_RECORDED = 40
JUNK = (None, -1, 0, 1, 2**31, 2**63 - 1, 1e308, "", "x", "../../etc", [], {}, True)

Descriptor = dict[str, Any]


def with_descriptors(
    payload: dict[str, Any], change: Callable[[Descriptor], Descriptor]
) -> bytes | None:
    """The body with each session descriptor changed; None: it opens no
    session of an engine on the trainer's host.
    """
    try:
        old = [json.loads(base64.b64decode(t)) for t in payload["serialized_named_tensors"]]
        # One with a group is signed: changed, or led elsewhere, it is refused.
        ours = [one for one in old if "endpoint" in one and not one.get("group")]
        new = [change(dict(descriptor)) for descriptor in ours]
    except (KeyError, TypeError, ValueError):
        return None
    encoded = [base64.b64encode(json.dumps(descriptor).encode()).decode() for descriptor in new]
    return json.dumps({**payload, "serialized_named_tensors": encoded}).encode() if new else None


def flipped(rng: random.Random, data: bytes) -> bytes:
    """The bytes with one bit changed."""
    bits = bytearray(data or b"\0")
    bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(8)
    return bytes(bits)


def with_a_wrong_field(rng: random.Random, frame: bytes) -> bytes:
    """The msgpack message with one value, anywhere in it, replaced by junk."""
    try:
        return msgspec.msgpack.encode(mutated(rng, msgspec.msgpack.decode(frame)))
    except msgspec.MsgspecError:
        return flipped(rng, frame)


def mutated(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """A deep copy with one value replaced, dropped, repeated or made huge."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.8):
        key = rng.choice(sorted(value, key=str))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated(rng, value[key], depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at]
        if rng.random() < 0.2:
            return value * rng.choice((2, 300))
        return [*value[:at], mutated(rng, value[at], depth + 1), *value[at + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return rng.choice((value[:at], value[:at] + "\u00e9" + value[at + 1 :], value * 50))
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 4, 1 << 20, 1 << 40))
    return rng.choice(JUNK)


SPOILERS = ("drop", "twice", "flip", "cut", "garbage", "field")


def spoilt(kind: str, rng: random.Random, frame: bytes) -> list[bytes]:
    """What comes in the frame's place; the frame, where it is reordered."""
    return {
        "drop": [],
        "twice": [frame, frame],
        "flip": [flipped(rng, frame)],
        "cut": [frame[: rng.randrange(len(frame))]] if frame else [],
        "garbage": [rng.randbytes(rng.randrange(200))],
        "field": [with_a_wrong_field(rng, frame)],
    }.get(kind, [frame])


REORDERS = ("swap", "late", "replay", "mute")


@dataclass
class Tamper:
    """Does something to one frame of one rank's session, and passes on the others.

    Attributes:
        kind: one of `SPOILERS` or `REORDERS`.
        to_engine: which way the frame goes.
        rank: whose session.
        at: which frame, from 0.
        rng: for the mutation.
        old: frames of earlier sessions.
        late_s: how long a late frame is held.
    """

    kind: str
    to_engine: bool
    rank: int
    at: int
    rng: random.Random
    old: list[bytes]
    late_s: float
    _kept: bytes | None = None

    def __call__(self, to_engine: bool, rank: int, index: int, frame: bytes) -> list[bytes]:
        """What goes on in the frame's place."""
        if (to_engine, rank) != (self.to_engine, self.rank):
            return [frame]
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return [frame, kept]
        if self.kind == "mute" and index >= self.at:
            return []
        if index != self.at:
            return [frame]
        if self.kind == "swap":
            self._kept = frame
            return []
        if self.kind == "late":
            time.sleep(self.late_s)
        before = [self.rng.choice(self.old or [b"?"])] if self.kind == "replay" else []
        return [*before, *spoilt(self.kind, self.rng, frame)]


class Wire:
    """See the module. Called by the fault proxy with each request's path and body.

    Args:
        folder: where session sockets may be bound; short, because a UNIX socket's path is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="relay-", dir=folder))
        self._context = zmq.Context()
        self._num_sockets = 0
        self._tamper: Tamper | None = None
        self._closing = threading.Event()
        self._relays: list[threading.Thread] = []
        self.bodies: dict[str, deque[bytes]] = defaultdict(lambda: deque(maxlen=NUM_RECORDED))
        self.frames: deque[bytes] = deque(maxlen=NUM_RECORDED)
        """To engines, of the last sessions."""

    def __call__(self, path: str, body: bytes) -> bytes:
        """Record the body; lead its sessions through relays, if they are to be tampered with."""
        if body.startswith(b"{"):
            self.bodies[path.strip("/")].append(body)
        if self._tamper is None or not path.endswith("update_weights_from_tensor"):
            return body
        tamper, ranks = self._tamper, itertools.count()

        def lead(descriptor: Descriptor) -> Descriptor:
            self._num_sockets += 1
            endpoint = f"ipc://{self._folder}/{self._num_sockets}"
            trainer, engine = self._socket(), self._socket()
            trainer.connect(descriptor["endpoint"])
            engine.bind(endpoint)
            to = {True: trainer, False: engine}, tamper, next(ranks)
            relay = threading.Thread(target=self._relay, args=to, daemon=True)
            self._relays.append(relay)
            relay.start()
            return {**descriptor, "endpoint": endpoint}

        return with_descriptors(json.loads(body), lead) or body

    def _relay(self, sources: dict[bool, zmq.Socket[bytes]], tamper: Tamper, rank: int) -> None:
        """Pass frames on until the wire closes: those that come of a source go to the other."""
        counts = {True: 0, False: 0}
        while not self._closing.is_set():
            for to_engine, source in sources.items():
                while source.poll(1):
                    frame = source.recv()
                    if to_engine:
                        self.frames.append(frame)
                    for out in tamper(to_engine, rank, counts[to_engine], frame):
                        with contextlib.suppress(zmq.Again):
                            sources[not to_engine].send(out, zmq.NOBLOCK)
                    counts[to_engine] += 1
        for end in sources.values():  # both ends see that their peer is gone
            end.close()

    @contextlib.contextmanager
    def tampered(self, tamper: Tamper) -> Iterator[None]:
        """Sessions that are opened meanwhile, through the proxy, pass `tamper`."""
        self._tamper = tamper
        try:
            yield
        finally:
            self._tamper = None
            self._closing.set()
            for relay in self._relays:
                relay.join(10)
            self._relays.clear()
            self._closing.clear()

    def _socket(self, linger_ms: int = 0) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.PAIR)
        made.setsockopt(zmq.LINGER, linger_ms)
        return made

    def intrude(self, path: Path, frames: list[bytes], *, raw: bool) -> None:
        """Send frames, or their bare bytes, to a trainer's socket that is not ours."""
        with contextlib.suppress(OSError, zmq.ZMQError):
            if raw:
                with socket.socket(socket.AF_UNIX) as link:
                    link.settimeout(0.5)
                    link.connect(str(path))
                    link.sendall(b"".join(frames))
                return
            with self._socket(50) as intruder:
                intruder.connect(f"ipc://{path}")
                for frame in frames:
                    intruder.send(frame, zmq.NOBLOCK)
                time.sleep(0.02)
