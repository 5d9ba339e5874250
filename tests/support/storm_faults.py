"""The faults of a storm: each a function that injects one (or says how many), and its weight."""

import base64
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from sglang_loader.common.broadcast.update_group import ANSWER_TIMEOUT_S
from support.fault_proxy import Fault as ProxyFault
from support.storm import Storm
from support.storm_checks import REPLY_S, Violation
from support.storm_trainer import BAD_EXPORTS, PATIENT_S, PLANTED, PRESETS, TIMEOUT_S
from support.storm_wire import (
    REORDERS,
    SPOILERS,
    Tamper,
    flipped,
    mutated,
    with_descriptors,
)

Inject = Callable[[Storm], int | None]


class Fault(NamedTuple):
    """A kind of fault: how often it is chosen, and what it does. Returns the number of faults."""

    name: str
    weight: float
    inject: Inject


FAULTS: list[Fault] = []
SESSIONS = ("packed", "in_place")
UPDATE = "update_weights_from_tensor"


def fault(name: str, weight: float) -> Callable[[Inject], Inject]:
    """Have a storm choose this function."""

    def register(inject: Inject) -> Inject:
        FAULTS.append(Fault(name, weight, inject))
        return inject

    return register


def _slow(storm: Storm) -> float:
    """Seconds before each tensor: half of the syncs take longer, so that faults fall into them."""
    return storm.rng.choice((0.0, 0.01))


@fault("trainer ranks are killed", 5)
def kill_ranks(storm: Storm) -> None:
    """One or all, in the middle of a sync."""
    ranks = storm.rng.choice(([storm.rng.randrange(storm.tp)], range(storm.tp)))
    trainer = storm.begin(slow_s=_slow(storm))
    storm.a_while(0.4)
    trainer.kill(*ranks)
    storm.finish()
    # An engine that was about to meet the dead one in the store of a group answers after this.
    storm.engine.post("flush_cache", b"", limit_s=ANSWER_TIMEOUT_S + REPLY_S)


@fault("a trainer rank, a scheduler or the HTTP server stands still", 9)
def stop_process(storm: Storm) -> None:
    """In the middle of a sync: mostly shortly, sometimes for longer than the trainer's limit."""
    trainer = storm.begin(slow_s=_slow(storm))
    storm.a_while(0.3)
    seconds = storm.rng.choice((0.1, 0.3, 0.5, TIMEOUT_S + 1))
    ranks = [each.process.pid for each in trainer.processes]
    pids = storm.rng.choice((ranks, storm.engine.server.schedulers, [storm.engine.pid]))
    with suppress(ProcessLookupError):
        pid = storm.rng.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    storm.finish(more_s=seconds)


@fault("a bad export", 12)
def bad_export(storm: Storm) -> None:
    alone = storm.rng.choice((None, storm.rng.randrange(storm.tp)))
    bad = storm.rng.choice(BAD_EXPORTS)
    once = alone is None and storm.rng.random() < 0.5  # all ranks' exports are of one kind
    at = storm.rng.randrange(99)
    # Only the first rank's tensors are broadcast. Of another's the data do not matter.
    broadcasts = bad != "meta" or alone in (None, 0)
    presets = [name for name in PRESETS if broadcasts or not name.startswith("broadcast")]
    preset = storm.rng.choice(presets)
    storm.begin(preset=preset, bad=bad, once=once, at=at, on=alone, limit_s=PATIENT_S)
    storm.finish(must_fail=True)


@fault("a fault planted in pull", 4)
def planted_fault(storm: Storm) -> None:
    """The trainer names other memory than its tensors have; the proof must refuse pull."""
    alone = storm.rng.choice((None, storm.rng.randrange(storm.tp)))
    planted = storm.rng.choice(PLANTED)
    trainer = storm.begin(preset="in_place", planted=planted, on=alone, limit_s=PATIENT_S)
    if any(errors := storm.finish()):
        raise Violation("not recovered", f"the export was to bring the weights: {errors}")
    pulled = trainer.run(lambda rank: rank.kept["num_pulled"])
    if any(pulled):
        raise Violation("bad sync accepted", f"buckets that were read in place, by rank: {pulled}")
    storm.row.detected += 1


@fault("two trainers at once", 4)
def two_trainers(storm: Storm) -> None:
    for number in (0, 1):
        storm.trainer(number)
    for number in (0, 1):
        storm.begin(number=number, slow_s=_slow(storm))
        storm.a_while(0.2)
    for number in (0, 1):
        storm.finish(number=number)


@fault("a reply is lost, held or cut, or a request repeated", 6)
def proxy_fault(storm: Storm) -> None:
    kind = storm.rng.choice(("lose", "hold", "cut", "twice"))
    seconds = {"hold": TIMEOUT_S + 1, "cut": storm.rng.uniform(0, 0.05)}
    storm.proxy.plan(ProxyFault(kind, storm.rng.randrange(1, 5), seconds.get(kind, 0.0)))
    storm.begin(via="proxy", slow_s=_slow(storm))
    try:
        storm.finish(more_s=TIMEOUT_S)
    finally:
        storm.proxy.plan(None)


@fault("a session's frame is lost, repeated, reordered or garbled", 20)
def tampered_frame(storm: Storm) -> None:
    tamper = Tamper(
        kind=storm.rng.choice((*SPOILERS, *REORDERS)),
        to_engine=storm.rng.random() < 0.5,
        rank=storm.rng.randrange(storm.tp),
        at=storm.rng.choice((0, 1, 2, storm.rng.randrange(12))),
        rng=random.Random(storm.rng.random()),  # for another thread
        old=list(storm.wire.frames),
        late_s=TIMEOUT_S + 1,
    )
    with storm.wire.tampered(tamper):
        storm.begin(preset=storm.rng.choice(SESSIONS), via="proxy")
        storm.finish(more_s=TIMEOUT_S)


@fault("a stranger at the trainer's socket", 6)
def intruder(storm: Storm) -> int:
    """Connects before or during a sync and sends garbage, old frames or nothing."""
    rng, old = storm.rng, list(storm.wire.frames)
    storm.begin(preset=rng.choice(SESSIONS), slow_s=_slow(storm))
    number = 0
    for _ in range(rng.randrange(1, 6)):
        storm.a_while(0.1)
        sockets = [p for p in storm.temporary.glob("weight-sync-*/*") if p.is_socket()]
        if sockets:
            frames = rng.choice((_garbage(rng), old, []))
            storm.wire.intrude(rng.choice(sorted(sockets)), frames, raw=rng.random() < 0.5)
            number += 1
    storm.finish()
    return number


def _garbage(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(rng.choice((0, 1, 60, 5000))) for _ in range(rng.randrange(1, 8))]


@fault("fuzzed requests over HTTP", 9)
def fuzz(storm: Storm) -> int:
    """Posts a batch of bodies; each is answered, with whatever status, and the engine lives."""
    for _ in range(storm.batch):
        endpoint = storm.rng.choice(ENDPOINTS)
        body = _fuzzed_body(storm, endpoint)
        reply, shown = storm.engine.post(endpoint, body), f"{endpoint} {body[:600]!r}"
        if not storm.engine.server.lives:
            raise Violation("engine died", shown)
        if reply.status == 0:
            raise Violation("hang", f"no reply within {REPLY_S:g} s to {shown}")
        storm.row.detected += reply.status >= 400
        if reply.status == 200 and endpoint.startswith("update"):
            storm.note(f"accepted: {shown}")
    return storm.batch


ENDPOINTS = (
    *(UPDATE, "update_weights_from_distributed"),
    *("release_memory_occupation", "resume_memory_occupation"),
)
TAGS = ("weights", "kv_cache", "cuda_graph")


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
    """One wrong field; a long limit has a fault of its own."""
    changed = mutated(rng, descriptor)
    limit_s = changed.get("timeout_s")
    is_long = isinstance(limit_s, int | float) and limit_s > 0
    return {**changed, "timeout_s": 0.3} if is_long else changed


@fault("the engine is killed", 0.1)
def kill_engine(storm: Storm) -> None:
    """A scheduler or the HTTP server, in the middle of a sync; another engine takes its place."""
    pid = storm.rng.choice((storm.engine.pid, *storm.engine.server.schedulers))
    storm.begin(slow_s=_slow(storm))
    storm.a_while(0.3)
    os.kill(pid, signal.SIGKILL)
    try:
        storm.finish()
    finally:
        storm.start_engine()
