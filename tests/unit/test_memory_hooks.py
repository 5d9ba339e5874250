"""Our hooks around SGLang's own weight updater, with a memory saver that loses the memory."""

import asyncio
import dataclasses
import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_loader.common.engine_settings import HOST_BACKUP_VARIABLE
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.session.messages import SESSION_FORMAT
from sglang_loader.hooks import http as http_hooks
from sglang_loader.hooks import memory as hooks
from sglang_loader.hooks import request_gate as gate_hooks
from sglang_loader.hooks import weights as weight_updater_hooks
from sglang_loader.hooks.weights import update_on_all_ranks
from sglang_loader.host_backup.backup import backup_of, create_backup
from sglang_loader.load_plan.destinations import collect_destinations
from sglang_loader.upstream import facts_of, with_facts
from support.reachable_memory import publish_coverage, reachable
from unit.released_memory import Residue, overwrite, poison, size_of, whole

LAYOUT = BucketLayout.pack([("linear.weight", (33, 7), torch.float32)])


class LosingSaver:
    """Stands in for torch_memory_saver: what is resumed holds poison; a wrong order is an error."""

    def __init__(self, model):
        self.model = model
        self.paused = set()

    def pause(self, tag):
        assert tag not in self.paused, f"{tag} was released twice"
        self.paused.add(tag)

    def resume(self, tag):
        self.paused.remove(tag)
        if tag == "weights":
            poison(self.model)


class Worker:
    """The part of a TP worker that the updater uses; `update` does what a session's loads do."""

    def __init__(self, model):
        self.model_runner = SimpleNamespace(model=model)
        self.server_args = SimpleNamespace(custom_weight_loader=[SESSION_FORMAT], dp_size=1)
        self.update = lambda: None

    def weight_update_runners(self):
        return [("target", self.model_runner)]

    def open_session(self, descriptor, models, steps, *, wants_proof):
        def load():
            steps.before_join()
            steps.before_loading(LAYOUT)
            self.update()

        return SimpleNamespace(
            load=load,
            await_commit=lambda: True,
            stop_reading=lambda: None,
            conclude=lambda *_: None,
            differing=[],
        )


def updater_with(**fields):
    """SGLang's; its constructor takes the group of the ranks, or looks for SGLang's own."""
    made = object.__new__(SchedulerWeightUpdaterManager)
    for field in dataclasses.fields(SchedulerWeightUpdaterManager):
        if field.default_factory is not dataclasses.MISSING:
            setattr(made, field.name, field.default_factory())
        elif field.default is not dataclasses.MISSING:
            setattr(made, field.name, field.default)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def updater(world_of_one, monkeypatch):
    torch.manual_seed(0)
    model = Residue()
    create_backup(model, "auto", reachable)
    made = updater_with(
        tp_worker=Worker(model),
        draft_worker=None,
        tp_cpu_group=world_of_one,
        memory_saver_adapter=LosingSaver(model),
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
        scheduler=SimpleNamespace(
            disaggregation_mode=None,
            _engine_paused=False,
            record_weight_version_change=lambda new_version: None,
        ),
    )
    guard = "_assert_weight_cache_inactive"  # asks the server's arguments, from 0.5.17 on
    monkeypatch.setattr(SchedulerWeightUpdaterManager, guard, lambda *_: None, raising=False)
    monkeypatch.setattr(weight_updater_hooks, "Session", made.tp_worker.open_session)
    descriptor = SimpleNamespace(
        manifest_check="off", syncs_draft=False, proof="none", group="", senders=""
    )
    monkeypatch.setattr(weight_updater_hooks, "decode_descriptor", lambda invitation: descriptor)
    return made


def model_of(updater):
    return updater.tp_worker.model_runner.model


# Upstream's own functions, whatever else this process has hooked.
ORIGINAL = {
    name: getattr(SchedulerWeightUpdaterManager, name)
    for name in ("release_memory_occupation", "resume_memory_occupation")
}


@pytest.fixture(autouse=True)
def without_a_device(monkeypatch):
    """Upstream synchronises the accelerator; this test has none."""
    module = SimpleNamespace(synchronize=lambda *_: None)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: module)


def release(updater, *tags):
    request = ReleaseMemoryOccupationReqInput(tags=list(tags) or None)
    return hooks.release_tags(ORIGINAL["release_memory_occupation"], updater, request)


def resume(updater, *tags):
    request = ResumeMemoryOccupationReqInput(tags=list(tags) or None)
    return hooks.resume_tags(ORIGINAL["resume_memory_occupation"], updater, request)


def update(updater, load_format=SESSION_FORMAT):
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[b""], load_format=load_format, flush_cache=True
    )
    return update_on_all_ranks(None, updater, request)


def refusal(reply):
    """What travels back, as the other process sees it."""
    return facts_of(pickle.loads(pickle.dumps(reply))).get("refusal")


@pytest.mark.parametrize("step", ("release", "resume"))
def test_tags_keep_the_requested_order_and_costs(updater, step, monkeypatch):
    monkeypatch.setattr(hooks, "_gpu_bytes", lambda _, tag: len(tag))
    order = ["cuda_graph", "weights", "kv_cache"]
    done = []
    monkeypatch.setattr(updater.memory_saver_adapter, "pause", done.append)
    monkeypatch.setattr(updater.memory_saver_adapter, "resume", done.append)
    reply = release(updater, *order)
    if step == "resume":
        held = backup_of(model_of(updater)).host_bytes
        assert held == size_of(model_of(updater))
        assert facts_of(reply)["costs"]["weights"]["host_bytes"] == [held]
        done.clear()
        reply = resume(updater, *order)
        assert facts_of(reply)["costs"]["weights"]["host_bytes"] == [0]
    assert done == order
    costs = facts_of(pickle.loads(pickle.dumps(reply)))["costs"]
    assert list(costs) == order
    assert {tag: cost["gpu_bytes"] for tag, cost in costs.items()} == {
        tag: [len(tag)] for tag in order
    }
    again = release(updater, "kv_cache") if step == "release" else resume(updater, "kv_cache")
    assert not facts_of(again), "nothing was to be done"


@pytest.mark.parametrize("step", (release, resume))
def test_an_unknown_tag_changes_nothing(updater, step):
    text = refusal(step(updater, "weights", "gradients"))
    assert text.startswith("TP rank 0: unknown memory tags ['gradients']. Allowed: ")
    assert all(tag in text for tag in ("kv_cache", "weights", "cuda_graph"))
    assert (updater.offload_tags, updater.memory_saver_adapter.paused) == (set(), set())


def test_a_backup_that_fails_refuses_the_release(updater):
    fails = Mock(side_effect=RuntimeError("no memory left on the host"))
    create_backup(model_of(updater), "auto", fails)
    assert "no memory left on the host" in refusal(release(updater, "weights"))
    assert updater.offload_tags == set()


def test_weights_shared_between_engines_are_not_released(updater, monkeypatch):
    refuse = Mock(side_effect=RuntimeError("the weights are shared with the daemon"))
    guard = "_assert_weight_cache_inactive"
    monkeypatch.setattr(SchedulerWeightUpdaterManager, guard, refuse, raising=False)
    assert "shared with the daemon" in refusal(release(updater, "kv_cache", "weights"))
    assert updater.offload_tags == set()
    assert refusal(release(updater, "kv_cache")) is None


def test_a_lack_of_gpu_memory_refuses_the_resume(updater, monkeypatch):
    release(updater, "weights")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3_000_000, 9_000_000))
    monkeypatch.setattr(hooks, "nbytes_under", lambda tag, device: 5_000_000)
    text = refusal(resume(updater, "weights"))
    assert "TP rank 0: resume of ['weights'] refused: it needs 5 MB" in text
    assert "2 MB more than are free" in text
    assert updater.offload_tags == {"weights"}


def covered_engine(updater):
    """The updater's model, with a proven coverage, and the loader that writes it."""
    model = model_of(updater)
    covered = whole(model, "linear.weight", "low")

    def load():
        overwrite(collect_destinations(model), covered)

    updater.tp_worker.update = load
    load()
    publish_coverage(model, covered)


@pytest.fixture
def gate(monkeypatch):
    """What the gate was set to last is its `reason`."""
    made = SimpleNamespace(reason=None)
    made.set = lambda reason: setattr(made, "reason", reason)
    monkeypatch.setattr(gate_hooks, "_gate", made)
    return made


def test_the_gate_stays_closed_until_a_good_sync(updater, gate):
    covered_engine(updater)
    good = updater.tp_worker.update
    assert facts_of(release(updater, "kv_cache", "weights"))["closed"] == gate.reason
    assert gate.reason == "the engine's memory is released: kv_cache, weights"
    resume(updater, "weights")
    assert gate.reason == "the engine's memory is released: kv_cache"
    assert update(updater).success
    assert gate.reason == "the engine's memory is released: kv_cache"
    assert facts_of(resume(updater, "kv_cache"))["closed"] is None
    assert gate.reason is None
    updater.tp_worker.update = Mock(side_effect=ValueError("no"))
    reply = update(updater)
    assert not reply.success
    assert facts_of(reply)["closed"] == gate.reason
    assert "the last sync was not complete" in gate.reason
    updater.tp_worker.update = good
    reply = update(updater)
    assert reply.success
    assert facts_of(reply)["closed"] is None
    assert gate.reason is None


def test_running_requests_refuse_releases_and_updates(updater, gate, caplog):
    updater.is_fully_idle = lambda **_: False
    updater.tp_worker.update = Mock(side_effect=ValueError("never called"))
    refused = release(updater, "weights")
    assert "requests are running" in refusal(refused) and facts_of(refused)["is_busy"]
    assert (updater.offload_tags, backup_of(model_of(updater)).host_bytes) == (set(), 0)
    assert not caplog.text, "it is asked again within milliseconds"
    reply = pickle.loads(pickle.dumps(update(updater)))
    assert facts_of(reply)["is_busy"]
    assert not reply.success
    assert "requests are running" in reply.message
    assert gate.reason is facts_of(reply)["closed"] is None
    updater.is_fully_idle, updater.tp_worker.update = lambda **_: True, lambda: None
    reply = update(updater)
    assert reply.success
    assert not facts_of(reply)["is_busy"]


@pytest.mark.parametrize("load_format", (SESSION_FORMAT, "flattened_bucket"))
def test_a_sync_into_released_weights_is_refused(updater, gate, load_format):
    covered_engine(updater)
    good = updater.tp_worker.update
    updater.tp_worker.update = Mock(side_effect=ValueError("never called"))
    release(updater)
    reply = update(updater, load_format)
    assert not reply.success
    assert "'weights'" in reply.message and "as they were" in reply.message
    assert facts_of(reply)["closed"] == gate.reason
    assert not backup_of(model_of(updater)).sync.is_half_written
    resume(updater, "weights")
    updater.tp_worker.update = good
    assert update(updater).success
    resume(updater)
    assert gate.reason is None


def test_weights_restored_whole_are_served_without_sync(updater, gate):
    release(updater)
    resume(updater, "kv_cache", "weights")
    assert gate.reason is None
    covered_engine(updater)
    release(updater)
    resume(updater)
    assert "undefined since the last resume" in gate.reason, "one stage: the sync is still to come"
    assert update(updater).success
    assert gate.reason is None


def test_the_cache_stays_released_without_synced_weights(updater, gate):
    covered_engine(updater)
    release(updater, "kv_cache", "weights")
    resume(updater, "weights")
    backup = backup_of(model_of(updater))
    assert backup.stale
    text = refusal(resume(updater, "kv_cache"))
    assert (
        text == f"TP rank 0: resume of ['kv_cache'] refused: {backup.stale}. Sync the weights first"
    )
    assert updater.offload_tags == updater.memory_saver_adapter.paused == {"kv_cache"}
    assert update(updater).success
    assert refusal(resume(updater, "kv_cache")) is None
    assert (updater.offload_tags, gate.reason) == (set(), None)


def test_other_servers_are_left_alone(updater):
    updater.tp_worker.server_args.custom_weight_loader = ["somebody.elses"]
    calls = []
    for step in (hooks.release_tags, hooks.resume_tags):
        step(lambda *arguments: calls.append(arguments), updater, "request")
    assert calls == [(updater, "request")] * 2
    runner = SimpleNamespace(server_args=updater.tp_worker.server_args)
    hooks.load_model(lambda *arguments: calls.append(arguments), runner)
    assert calls[2:] == [(runner,)]


# In the process that serves HTTP.


class Manager:
    """The part of a tokenizer manager that the hooks use."""

    def __init__(self, *replies, loaders=(SESSION_FORMAT,)):
        self.server_args = SimpleNamespace(custom_weight_loader=list(loaders))
        self.auto_create_handle_loop = lambda: None

        async def communicate(_):
            return replies

        self.release_memory_occupation_communicator = communicate
        self.resume_memory_occupation_communicator = communicate


@pytest.mark.parametrize("hook", (http_hooks.release_or_raise, http_hooks.resume_or_raise))
def test_a_refusal_is_raised_at_the_request(hook):
    good = ReleaseMemoryOccupationReqOutput()
    bad = with_facts(ReleaseMemoryOccupationReqOutput(), refusal="TP rank 1: no")
    asyncio.run(hook(None, Manager(good, good), "request"))
    with pytest.raises(http_hooks.MemoryRequestRefused, match="TP rank 1: no"):
        asyncio.run(hook(None, Manager(good, bad), "request"))
    told = with_facts(ReleaseMemoryOccupationReqOutput(), costs={"weights": {"seconds": [0.25]}})
    costs = asyncio.run(hook(None, Manager(told, told), "request"))
    assert costs == {"weights": {"seconds": [0.25, 0.25]}}, "of all groups of ranks"


def test_requests_to_other_servers_go_upstreams_way():
    calls = []

    async def original(*arguments):
        calls.append(arguments)

    manager = Manager(loaders=())
    asyncio.run(http_hooks.release_or_raise(original, manager, "request"))
    assert calls == [(manager, "request", None)]


# Loading.


class Runner:
    """A model runner whose upstream `load_model` notes whether SGLang's backup was asked for."""

    def __init__(self, device="cuda", is_draft_worker=False, **arguments):
        self.device, self.is_draft_worker = device, is_draft_worker
        self.server_args = SimpleNamespace(
            custom_weight_loader=[SESSION_FORMAT],
            enable_memory_saver=True,
            enable_weights_cpu_backup=True,
            speculative_algorithm=None,
            cpu_offload_gb=0,
        )
        vars(self.server_args).update(arguments)
        self.memory_saver_adapter = SimpleNamespace(region=self.region)

    def region(self, tag, enable_cpu_backup):
        self.stock_backup = enable_cpu_backup

    def load(self):
        asked = self.server_args.enable_weights_cpu_backup
        self.memory_saver_adapter.region("weights", enable_cpu_backup=asked)
        self.model = Residue()


@pytest.mark.parametrize(
    ("value", "arguments", "stock", "ours"),
    [
        ("on", {}, True, "on"),
        ("auto", {}, False, "auto"),
        ("auto", {"speculative_algorithm": "EAGLE"}, False, "auto"),
        ("auto", {"speculative_algorithm": "EAGLE", "is_draft_worker": True}, False, None),
        ("on", {"speculative_algorithm": "EAGLE", "is_draft_worker": True}, True, None),
        ("auto", {"cpu_offload_gb": 4}, True, "on"),
        ("auto", {"device": "cpu"}, True, "on"),
        ("auto", {"enable_memory_saver": False}, True, "on"),
        ("auto", {"enable_weights_cpu_backup": False}, False, "on"),
    ],
)
def test_who_backs_up_the_weights(value, arguments, stock, ours, monkeypatch):
    runner = Runner(**arguments)
    monkeypatch.setenv(HOST_BACKUP_VARIABLE, value)
    monkeypatch.setattr(hooks, "under_weights_tag", reachable)
    hooks.load_model(Runner.load, runner)
    assert runner.stock_backup is stock
    assert runner.memory_saver_adapter.region == runner.region, "as it was"
    backup = backup_of(runner.model)
    assert (backup and backup.policy) == ours


@pytest.mark.parametrize(("value", "devices"), [("auto", [torch.device("cpu")]), ("on", [])])
def test_mode_compiled_compiles_kernels_at_launch(monkeypatch, value, devices):
    """A first sync would wait for them. The variable is of the mode, see `config`."""
    compiled = []
    monkeypatch.setenv(HOST_BACKUP_VARIABLE, value)
    monkeypatch.setattr(hooks, "under_weights_tag", reachable)
    monkeypatch.setattr(hooks, "compile_kernels", compiled.append)
    hooks.load_model(Runner.load, Runner())
    assert compiled == devices, "the model's"


def test_memory_missing_after_loading_is_an_error(monkeypatch):
    """Neither SGLang nor we would save it."""
    runner = Runner()
    monkeypatch.setenv(HOST_BACKUP_VARIABLE, "auto")
    with pytest.raises(RuntimeError, match=r"Use \+weight_sync=flattened"):
        hooks.load_model(Runner.load, runner)
