"""The faults of a storm: each a function that injects one (or says how many), and its weight."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from support.fault_proxy import Fault as ProxyFault
from support.fault_proxy import plan
from support.storm import Storm
from support.storm_checks import REPLY_S, Violation
from support.storm_trainer import BAD_EXPORTS, TIMEOUT_S, World
from support.storm_wire import (
    TO_ENGINE,
    TO_TRAINER,
    Recorded,
    Tamper,
    emptied,
    flipped,
    mutated,
    with_a_wrong_field,
    with_descriptors,
)

Inject = Callable[[Storm], int | None]


@dataclass(frozen=True)
class Fault:
    """A kind of fault: how often it is chosen, and what it does. Returns the number of faults."""

    name: str
    weight: float
    inject: Inject


FAULTS: list[Fault] = []
SESSIONS = ("packed", "in_place")


def fault(name: str, weight: float) -> Callable[[Inject], Inject]:
    """Have a storm choose this function."""

    def register(inject: Inject) -> Inject:
        FAULTS.append(Fault(name, weight, inject))
        return inject

    return register


def _slow(storm: Storm) -> float:
    """Seconds before each tensor: half of the syncs take longer, so that faults fall into them."""
    return storm.rng.choice((0.0, 0.01))


@fault("a trainer rank is killed", 3)
def kill_rank(storm: Storm) -> None:
    _kill(storm, storm.rng.randrange(storm.tp))


@fault("all trainer ranks are killed", 2)
def kill_world(storm: Storm) -> None:
    _kill(storm, *range(storm.tp))


def _kill(storm: Storm, *ranks: int) -> None:
    """In the middle of a sync."""
    world = storm.begin(slow_s=_slow(storm))
    storm.a_while(0.4)
    world.kill(*ranks)
    storm.finish()


@fault("a trainer rank stands still", 3)
def stop_rank(storm: Storm) -> None:
    _stand_still(storm, lambda world: storm.rng.choice(world.pids))


@fault("the HTTP server stands still", 3)
def stop_server(storm: Storm) -> None:
    _stand_still(storm, lambda _: storm.engine.server.process.pid)


@fault("a scheduler stands still", 3)
def stop_scheduler(storm: Storm) -> None:
    _stand_still(storm, lambda _: storm.rng.choice(storm.engine.schedulers()))


def _stand_still(storm: Storm, pid_of: Callable[[World], int]) -> None:
    """Stop a process in the middle of a sync: mostly shortly, sometimes for longer than the
    trainer's limit.
    """
    world = storm.begin(slow_s=_slow(storm))
    storm.a_while(0.3)
    seconds = storm.rng.choice((0.1, 0.3, 0.5, TIMEOUT_S + 1))
    with suppress(ProcessLookupError):
        pid = pid_of(world)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    storm.finish(more_s=seconds)


@fault("a bad export", 12)
def bad_export(storm: Storm) -> None:
    alone = storm.rng.choice((None, storm.rng.randrange(storm.tp)))
    bad = storm.rng.choice(BAD_EXPORTS)
    once = alone is None and storm.rng.random() < 0.5  # all ranks' exports are of one kind
    storm.begin(bad=bad, once=once, at=storm.rng.randrange(99), on=alone)
    storm.finish(must_fail=True)


@fault("two trainers at once", 4)
def two_trainers(storm: Storm) -> None:
    for trainer in (0, 1):
        storm.world(trainer)
    for trainer in (0, 1):
        storm.begin(trainer=trainer, slow_s=_slow(storm))
        storm.a_while(0.2)
    for trainer in (0, 1):
        storm.finish(trainer=trainer)


@fault("a reply is lost, held or cut, or a request repeated", 6)
def proxy_fault(storm: Storm) -> None:
    kind = storm.rng.choice(("lose", "hold", "cut", "twice"))
    seconds = {"hold": TIMEOUT_S + 1, "cut": storm.rng.uniform(0, 0.05)}
    plan(storm.proxy, ProxyFault(kind, storm.rng.randrange(1, 5), seconds.get(kind, 0.0)))
    storm.begin(via="proxy", slow_s=_slow(storm))
    try:
        storm.finish(more_s=TIMEOUT_S)
    finally:
        plan(storm.proxy, None)


def _relayed(storm: Storm, kind: str, **sync: Any) -> Tamper:
    """A session of which one frame is tampered with."""
    old = [frame for session in storm.wire.sessions for frame in session.frames.get(0, [])]
    tamper = Tamper(
        kind=kind,
        direction=storm.rng.choice((TO_ENGINE, TO_TRAINER)),
        rank=storm.rng.randrange(storm.tp),
        at=storm.rng.choice((0, 1, 2, storm.rng.randrange(12))),
        rng=random.Random(storm.rng.random()),  # for another thread
        old=old[-60:],
        late_s=TIMEOUT_S + 1,
    )
    with storm.wire.tampered(tamper):
        storm.begin(preset=storm.rng.choice(SESSIONS), via="proxy", **sync)
        storm.finish(more_s=TIMEOUT_S)
    return tamper


@fault("a session's frame is lost, repeated, reordered or garbled", 20)
def tampered_frame(storm: Storm) -> None:
    _relayed(storm, storm.rng.choice(Tamper.KINDS))


@fault("a stranger at the trainer's socket", 6)
def intruder(storm: Storm) -> int:
    """Connects before or during a sync and sends garbage, old frames or nothing."""
    recorded = list(_recorded(storm).frames[0])  # may take a sync of its own
    storm.begin(preset=storm.rng.choice(SESSIONS), slow_s=_slow(storm))
    number = 0
    for _ in range(storm.rng.randrange(1, 6)):
        storm.a_while(0.1)
        sockets = [p for p in storm.temporary.glob("weight-sync-*/*") if p.is_socket()]
        if sockets:
            frames = storm.rng.choice((_garbage(storm.rng), recorded, []))
            path, raw = storm.rng.choice(sorted(sockets)), storm.rng.random() < 0.5
            storm.wire.intrude(path, frames, raw=raw)
            number += 1
    storm.finish()
    return number


def _garbage(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(rng.choice((0, 1, 60, 5000))) for _ in range(rng.randrange(1, 8))]


def _recorded(storm: Storm) -> Recorded:
    """A whole session of this storm, with at least one bucket."""
    whole = [session for session in storm.wire.sessions if len(session.frames.get(0, [])) > 2]
    if not whole:
        _relayed(storm, "none")
        whole = [storm.wire.sessions[-1]]
    return storm.rng.choice(whole)


@fault("a hostile trainer opens a session", 10)
def hostile_trainer(storm: Storm) -> None:
    """Says nothing, garbage, a part of an old session, a mutated one, or an empty one."""
    recorded, rng = _recorded(storm), storm.rng
    what = rng.choice(("silence", "garbage", "a part", "shuffled", "mutated", "empty", "gone"))
    listeners = []

    def lead(descriptor: dict[str, Any]) -> dict[str, Any]:
        endpoint, listener = storm.wire.listen()
        listeners.append(listener)
        return {**descriptor, "endpoint": endpoint, "timeout_s": 1.0}

    payload = {**recorded.payload, "weight_version": "hostile"}
    body = with_descriptors(payload, lead)
    assert body is not None, "only sessions are recorded"
    storm_reply: list[Any] = []
    asking = threading.Thread(
        target=lambda: storm_reply.append(
            storm.engine.post("update_weights_from_tensor", body, limit_s=2 * REPLY_S)
        )
    )
    asking.start()
    for rank, listener in enumerate(listeners):
        if listener.poll(3000):
            for frame in _hostile_frames(what, recorded.frames.get(rank, []), rng):
                listener.send(frame)
        if what == "gone":
            listener.close()
    asking.join(3 * REPLY_S)
    for listener in listeners:
        listener.close()
    _check_refused(storm, storm_reply[0].status, f"a hostile trainer ({what})")


def _hostile_frames(what: str, frames: list[bytes], rng: random.Random) -> list[bytes]:
    part = frames[: rng.randrange(len(frames))] if frames else []
    if what == "shuffled":
        rng.shuffle(part)
    if what == "mutated" and part:
        at = rng.randrange(len(part))
        part[at] = rng.choice((flipped, with_a_wrong_field))(rng, part[at])
    if what == "empty":
        return [frames[0], emptied(frames[-1])] if frames else []
    return {"silence": [], "garbage": _garbage(rng), "gone": []}.get(what, part)


def _check_refused(storm: Storm, status: int, what: str) -> None:
    if status == 0:
        raise Violation("hang", f"{what}: no reply")
    if status == 200:
        raise Violation("bad sync accepted", what)
    storm.detected()


@fault("fuzzed updates over HTTP", 5)
def fuzzed_updates(storm: Storm) -> int:
    return _fuzz(storm, ("update_weights_from_tensor", "update_weights_from_distributed"))


@fault("fuzzed releases and resumes over HTTP", 4)
def fuzzed_stages(storm: Storm) -> int:
    return _fuzz(storm, ("release_memory_occupation", "resume_memory_occupation"))


TAGS = ("weights", "kv_cache", "cuda_graph")


def _fuzz(storm: Storm, endpoints: tuple[str, ...]) -> int:
    """Posts a batch of bodies; each is answered, with whatever status, and the engine lives."""
    rng = storm.rng
    for _ in range(storm.batch):
        endpoint = rng.choice(endpoints)
        body = _fuzzed_body(storm, endpoint)
        reply = storm.engine.post(endpoint, body)
        shown = f"{endpoint} {body[:600]!r}"
        if storm.engine.server.process.poll() is not None:
            raise Violation("engine died", shown)
        if reply.status == 0:
            raise Violation("hang", f"no reply within {REPLY_S:g} s to {shown}")
        storm.detected(reply.status >= 400)
        if reply.status == 200 and endpoint.startswith("update"):
            storm.note(f"accepted: {shown}")
    return storm.batch


def _fuzzed_body(storm: Storm, endpoint: str) -> bytes:
    rng = storm.rng
    if endpoint.endswith("occupation"):
        some = [rng.choice((*TAGS, "gradients", None, 7, ["weights"])) for _ in range(3)]
        payload = rng.choice(({}, {"tags": None}, {"tags": rng.sample(TAGS, 2)}, {"tags": some}))
        return json.dumps(payload if rng.random() < 0.5 else mutated(rng, payload)).encode()
    recorded = storm.wire.bodies.get(endpoint)
    if not recorded or rng.random() < 0.1:
        return rng.choice((rng.randbytes(200), b"", b"[]", b"null", b"[" * 9000, b'{"a": NaN}'))
    body = rng.choice(list(recorded))
    if rng.random() < 0.1:
        return body[: rng.randrange(len(body))]
    payload = {**json.loads(body), "weight_version": None}  # anybody may name a version anyway
    if rng.random() < 0.5:
        changed = with_descriptors(payload, partial(_mutated_descriptor, rng))
        if changed is not None:
            return changed
    if rng.random() < 0.3 and payload.get("serialized_named_tensors"):
        handles = [flipped(rng, base64.b64decode(h)) for h in payload["serialized_named_tensors"]]
        payload["serialized_named_tensors"] = [base64.b64encode(h).decode() for h in handles]
        return json.dumps(payload).encode()
    # SGLang's own formats are not ours to guard.
    kept = {key: payload[key] for key in ("load_format", "weight_version")}
    return json.dumps({**mutated(rng, payload), **kept}).encode()


def _mutated_descriptor(rng: random.Random, descriptor: dict[str, Any]) -> dict[str, Any]:
    """One wrong field; a long limit has a fault of its own (`dead_endpoint`)."""
    changed = mutated(rng, descriptor)
    limit_s = changed.get("timeout_s")
    is_long = isinstance(limit_s, int | float) and limit_s > 0
    return {**changed, "timeout_s": 0.3} if is_long else changed


@fault("a session where nobody listens", 0.5)
def dead_endpoint(storm: Storm) -> None:
    """The engine's limit is the descriptor's; a hostile one is endless."""
    endpoint = storm.rng.choice(("tcp://10.255.255.1:9", storm.wire.new_endpoint(), "inproc://x"))
    limit_s = storm.rng.choice((1.0, 1e9))
    body = with_descriptors(
        {**_recorded(storm).payload, "weight_version": "nobody"},
        lambda d: {**d, "endpoint": endpoint, "timeout_s": limit_s},
    )
    assert body is not None, "only sessions are recorded"
    reply = storm.engine.post("update_weights_from_tensor", body)
    _check_refused(storm, reply.status, f"{endpoint} with a limit of {limit_s:g} s")


@fault("the engine is killed", 0.1)
def kill_engine(storm: Storm) -> None:
    """A scheduler or the HTTP server, in the middle of a sync; another engine takes its place."""
    pid = storm.rng.choice((storm.engine.server.process.pid, *storm.engine.schedulers()))
    storm.begin(slow_s=_slow(storm))
    storm.a_while(0.3)
    os.kill(pid, signal.SIGKILL)
    try:
        storm.finish()
    finally:
        storm.start_engine()
