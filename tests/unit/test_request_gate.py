"""What the gate lets through, holds and refuses, with SGLang's own messages."""

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import io_struct as io
from sglang.srt.utils.aio_rwlock import RWLock

from sglang_loader.common.engine_settings import (
    GRAPHS_VARIABLE,
    STALE_REQUESTS_VARIABLE,
    requested_stale_requests_timeout_s,
)
from sglang_loader.common.session.messages import SESSION_FORMAT
from sglang_loader.hooks import http as http_hooks
from sglang_loader.hooks import request_gate as gate_hooks
from sglang_loader.hooks.request_gate import RequestGate
from sglang_loader.upstream import (
    WARM_UP_PREFIX,
    facts_of,
    is_warm_up,
    mark_warm_ups,
    with_facts,
)
from support.messages import message

REASON = "the engine's memory is released: kv_cache"


def request(rid, kind=io.TokenizedGenerateReqInput):
    """A request as it comes from the tokenizer; the gate looks at nothing but its id."""
    return message(kind, rid=rid)


def update():
    return io.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[b""])


UPDATE = SimpleNamespace(load_format="sglang_loader.session", weight_version=None)


class Gate(RequestGate):
    """Keeps in `sent` what goes back to the tokenizer; it is `now` by its clock."""

    def __init__(self, limit_s=10.0):
        self.now, self.sent = 0.0, []
        sender = SimpleNamespace(send_output=lambda output, request: self.sent.append(output))
        channels = SimpleNamespace(send_to_tokenizer=sender)
        super().__init__(limit_s, channels, lambda: self.now)


def test_waiting_requests_keep_their_order():
    gate = Gate()
    gate.set(REASON)
    first, embedding = request("a"), request("b", io.TokenizedEmbeddingReqInput)
    batch = io.BatchTokenizedGenerateReqInput(batch=[request("c"), request("d")])
    flush = io.FlushCacheReqInput()
    assert gate.let_through([first, flush, embedding, batch]) == [flush]
    assert gate.let_through([]) == []
    gate.set(None)
    last = request("e")
    assert gate.let_through([last]) == [first, embedding, *batch.batch, last]
    assert (gate.num_held, gate.sent) == (0, [])


@pytest.mark.parametrize(
    "closing",
    (
        update(),
        io.ReleaseMemoryOccupationReqInput(),
        io.ResumeMemoryOccupationReqInput(),
    ),
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("limit_s", (10.0, 0.0))
def test_a_request_behind_a_release_waits(limit_s, closing):
    gate = Gate(limit_s)
    before, behind = request("a"), request("b")
    assert gate.let_through([before, closing, behind]) == [before, closing]
    assert gate.let_through([]) == [behind], "the gate stayed open"
    assert gate.let_through([closing, behind]) == [closing]
    gate.set(REASON)
    assert gate.let_through([]) == []
    assert [answer.rid for answer in gate.sent] == ([] if limit_s else ["b"])


def test_refusals_are_http_503_with_the_reason():
    gate = Gate(limit_s=0.0)
    gate.set(REASON)
    batch = io.BatchTokenizedGenerateReqInput(batch=[request("a"), request("b")])
    assert gate.let_through([batch]) == []
    assert [answer.rid for answer in gate.sent] == ["a", "b"]
    for answer in gate.sent:
        assert isinstance(answer, io.AbortReq)
        assert answer.finished_reason["status_code"] == 503
        assert answer.finished_reason["message"] == f"not served: {REASON}"


def test_an_overdue_request_is_refused():
    gate = Gate()
    gate.set(REASON)
    gate.let_through([request("a")])
    gate.now = 6.0
    gate.let_through([request("b")])
    gate.now = 11.0
    gate.let_through([])
    (answer,) = gate.sent
    assert (answer.rid, gate.num_held) == ("a", 1)
    assert answer.finished_reason["message"] == f"not served for 10 s: {REASON}"
    gate.set(None)
    assert [held.rid for held in gate.let_through([])] == ["b"]


@pytest.mark.parametrize("reason", (None, REASON))
def test_a_gate_that_refuses_lets_no_request_wait(reason):
    gate = Gate(limit_s=600.0)
    gate.set(REASON)
    gate.let_through([request("held")])
    gate.refuse("taken")
    gate.set(reason)
    flush = io.FlushCacheReqInput()
    assert gate.let_through([flush, request("new")]) == [flush]
    assert [answer.rid for answer in gate.sent] == ["held", "new"]
    for answer in gate.sent:
        assert answer.finished_reason["status_code"] == 503
        assert answer.finished_reason["message"] == "not served: taken"
    gate.refuse(None)
    later = request("later")
    assert gate.let_through([later]) == ([] if reason else [later])
    assert gate.num_held == bool(reason)


@pytest.mark.parametrize("limit_s", (10.0, 0.0))
def test_a_closed_gate_gives_signs_of_life(limit_s):
    gate = Gate(limit_s)
    gate.set(REASON)
    assert gate.let_through([request(f"{HEALTH_CHECK_RID_PREFIX}_1")]) == []
    assert [type(answer) for answer in gate.sent] == [io.HealthCheckOutput]
    gate.set(None)
    assert gate.let_through([]) == []


@pytest.mark.parametrize(("text", "limit_s"), ((None, 600.0), ("2.5", 2.5), ("0", 0.0)))
def test_the_limit_travels_in_the_environment(monkeypatch, text, limit_s):
    monkeypatch.delenv(STALE_REQUESTS_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(STALE_REQUESTS_VARIABLE, text)
    assert requested_stale_requests_timeout_s() == limit_s


# The hooks around it.


@pytest.fixture
def process(monkeypatch):
    """The state of a scheduler process; `process(loaders)` launches its scheduler."""
    monkeypatch.setattr(gate_hooks, "_gate", None)
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(custom_weight_loader=[SESSION_FORMAT]),
        ipc_channels=Mock(),
    )

    def launch(loaders=(SESSION_FORMAT,), load_format="auto"):
        scheduler.server_args.custom_weight_loader = list(loaders)
        scheduler.server_args.load_format = load_format
        calls = []
        gate_hooks.init_receiver(calls.append, scheduler)
        assert calls == [scheduler]

    return launch


@pytest.fixture
def random_weights(process, monkeypatch):
    """A scheduler that was launched with random weights."""
    monkeypatch.setattr(gate_hooks, "_has_random_weights", False)
    monkeypatch.setattr(gate_hooks, "backup_of", lambda _: None)
    process(load_format="dummy")
    return SimpleNamespace(offload_tags=set(), tp_worker=Mock())


def test_random_weights_are_served_only_after_sync(random_weights):
    assert pull([request("a")]) == []
    assert "load_format=dummy" in gate_hooks.gate_reason()
    for tags in ({"weights", "kv_cache"}, set()):  # verl sleeps an engine right after its launch
        random_weights.offload_tags = tags
        gate_hooks.set_gate(gate_hooks.closing_reason(random_weights))
        assert pull([]) == []
    gate_hooks.note_published()
    gate_hooks.set_gate(gate_hooks.closing_reason(random_weights))
    assert [message.rid for message in pull([])] == ["a"]


@pytest.mark.parametrize("success", (True, False))
def test_an_update_of_others_opens_the_gate(random_weights, success):
    reply = gate_hooks.note_other_update(
        lambda *_: SimpleNamespace(success=success), random_weights, "request"
    )
    assert (gate_hooks.gate_reason() is None) is success
    if success:
        assert facts_of(reply)["closed"] is None


def test_an_engine_with_loaded_weights_serves_at_once(process, monkeypatch):
    monkeypatch.setattr(gate_hooks, "_has_random_weights", False)
    process(load_format="auto")
    assert len(pull([request("a")])) == 1
    process(loaders=(), load_format="dummy")
    assert len(pull([request("a")])) == 1, "of another server"


def test_a_warm_up_runs_on_random_weights_alone(random_weights):
    warm_up = request(f"{WARM_UP_PREFIX}1")
    batch = io.BatchTokenizedGenerateReqInput(batch=[request(f"{WARM_UP_PREFIX}2")])
    mixed = io.BatchTokenizedGenerateReqInput(batch=[request(f"{WARM_UP_PREFIX}3"), request("a")])
    assert pull([warm_up, batch, mixed]) == [warm_up, batch]
    gate_hooks.set_gate(REASON)
    assert pull([request(f"{WARM_UP_PREFIX}4")]) == []


def test_random_weights_lock_admits_the_first_sync():
    """A request that waits for the sync holds SGLang's lock."""

    async def run():
        manager = Manager([reply(closed=None, is_busy=False)])
        manager.server_args.load_format = "dummy"
        async with manager.model_update_lock.reader_lock:
            await manager.update()
            with pytest.raises(TimeoutError):
                await manager.update(0.3)

    asyncio.run(run())


def test_warm_ups_of_sglang_are_marked():
    posted, generated = [], []

    class Requests:
        get = "as it is"
        post = staticmethod(lambda url, **more: posted.append((url, more)))

    async def execute_warmups(mode, names, manager):
        manager.generate_request(SimpleNamespace(), None)

    server = SimpleNamespace(requests=Requests, execute_warmups=execute_warmups)
    mark_warm_ups(server)
    mark_warm_ups(server)
    server.requests.post("url", json={"text": "x"}, timeout=3)
    manager = SimpleNamespace(generate_request=lambda obj, request: generated.append(obj))
    asyncio.run(server.execute_warmups("null", ["x"], manager))
    ((url, more),) = posted
    assert (url, more["json"]["text"], more["timeout"]) == ("url", "x", 3)
    marked = SimpleNamespace(**more["json"]), *generated
    assert len(marked) == 2 and all(map(is_warm_up, marked))
    assert server.requests.get == "as it is"


def pull(messages, pp_rank=0):
    with patch.object(gate_hooks, "pp_rank", lambda: pp_rank):
        return gate_hooks.receive_through_gate(lambda _: messages, None)


def test_only_the_receiving_rank_holds_requests(process):
    process()
    gate_hooks.set_gate(REASON)
    assert pull([request("a")]) == []
    assert pull(None) is None, "a rank that gets the broadcast"
    second_stage = [request("b")]
    assert pull(second_stage, pp_rank=1) == second_stage
    gate_hooks.set_gate(None)
    assert [message.rid for message in pull([])] == ["a"]


def test_other_servers_have_no_gate(process):
    process(loaders=())
    gate_hooks.set_gate(REASON)
    messages = [request("a")]
    assert pull(messages) is messages


@pytest.mark.parametrize(
    ("tags", "stale", "graphs", "reason"),
    (
        ((), None, "", None),
        (("weights", "kv_cache"), "x", "", "the engine's memory is released: kv_cache, weights"),
        ((), "half", "", "the weights are not complete: half"),
        (("cuda_graph",), None, "", None),
        (("cuda_graph",), None, "true", "the engine's memory is released: cuda_graph"),
    ),
)
def test_why_the_gate_is_closed(monkeypatch, tags, stale, graphs, reason):
    monkeypatch.setenv(GRAPHS_VARIABLE, graphs)
    monkeypatch.setattr(gate_hooks, "backup_of", lambda _: SimpleNamespace(stale=stale))
    updater = SimpleNamespace(offload_tags=set(tags), tp_worker=Mock())
    assert gate_hooks.closing_reason(updater) == reason


# In the process that serves HTTP.


def reply(**told):
    return with_facts(SimpleNamespace(success=True), **told)


class Manager:
    """A tokenizer manager whose updates take SGLang's own lock, as upstream's do.

    Args:
        answers: the engine's replies to one request after the other; the last one to all later.
    """

    def __init__(self, *answers, loaders=(SESSION_FORMAT,)):
        self.server_args = SimpleNamespace(custom_weight_loader=list(loaders))
        self.model_update_lock = RWLock()
        self.answers = list(answers)
        self.asked = []
        self.update_weights_from_tensor_communicator = self.ask

    async def ask(self, request):
        self.asked.append(request)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def original(self, manager, obj, request):
        async with manager.model_update_lock.writer_lock:
            return await manager.update_weights_from_tensor_communicator(obj)

    async def update(self, limit_s=30.0):
        return await asyncio.wait_for(http_hooks.update(self.original, self, UPDATE), limit_s)


def test_a_waiting_request_does_not_block_sync():
    async def run():
        manager = Manager([reply(closed="half", is_busy=False)])
        http_hooks.note_gate(manager, [reply(closed=REASON)])
        async with manager.model_update_lock.reader_lock:
            await manager.update()
            await manager.update()  # after a failed sync
            manager.answers = [[reply(closed=None, is_busy=False)]]
            await manager.update()
            with pytest.raises(TimeoutError):
                await manager.update(0.3)
            assert await manager.model_update_lock.is_locked()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("replies", "is_closed"),
    (
        ([reply(closed=None), reply(closed=REASON)], True),
        ([reply(closed=None), reply(closed=None)], False),
        ([reply()], None),
        ([], None),
    ),
)
def test_the_gate_follows_the_engines_last_report(replies, is_closed):
    for before in (True, False):
        manager = Manager([])
        lock = http_hooks.update_lock_of(manager)
        assert http_hooks.update_lock_of(manager) is lock
        lock.is_gate_closed = before
        http_hooks.note_gate(manager, replies)
        assert lock.is_gate_closed == (before if is_closed is None else is_closed)


BUSY, GOOD = [reply(closed=None, is_busy=True)], [reply(closed=None, is_busy=False)]


def test_a_busy_engine_is_asked_again():
    manager = Manager(BUSY, [*GOOD, *BUSY], GOOD)
    assert asyncio.run(manager.update()) == GOOD
    assert manager.asked == [UPDATE] * 3
    assert asyncio.run(manager.update()) == GOOD
    assert len(manager.asked) == 4, "wrapped once, and good at once"


def test_an_engine_that_stays_busy_is_given_up(monkeypatch):
    monkeypatch.setattr(http_hooks, "BUSY_WAIT_S", 0.5)
    manager = Manager(BUSY)
    assert asyncio.run(manager.update()) == BUSY
    assert len(manager.asked) > 1


def test_updates_of_other_servers_are_not_followed():
    async def run():
        manager = Manager(BUSY, loaders=())
        assert await manager.update() == BUSY
        assert len(manager.asked) == 1
        assert isinstance(manager.model_update_lock, RWLock)

    asyncio.run(run())
