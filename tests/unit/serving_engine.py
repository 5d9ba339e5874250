"""An engine's server in this process: each of its TP ranks is a thread that serves real sessions.

engine = ServingEngine(tp=2)
weight_sync = colocated(engine, "flattened", ranks)
report = synced(weight_sync, weights)
engine.models[1].loaded             # what TP rank 1 got in the last sync, by name
"""

import asyncio
import base64
import threading
import time
import traceback
from concurrent.futures import Future

import torch
from torch import nn

from sglang_loader.common.replies import with_remarks
from sglang_loader.common.session.messages import SESSION_FORMAT, decode_descriptor
from sglang_loader.session import serve as session
from sglang_loader.session.group_receiver import GroupReceiver
from sglang_loader.session.mapped_memory import MappedMemory
from support.settings import settings_of
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.report import SyncReport
from verl_sglang_sync.sync.topologies import colocated_sync
from verl_sglang_sync.trainer_ranks import TrainerRanks

NO_STEPS = session.SessionSteps(
    before_join=lambda: None, before_writing=lambda: None, before_loading=lambda layout: None
)

_thread = threading.local()


class _OfEachRank:
    """What is global in an engine's process, for threads that stand in for processes."""

    def __init__(self, make):
        self._make, self._elsewhere = make, make()

    def __getattr__(self, name):
        state = getattr(_thread, "state", None)
        made = self._elsewhere if state is None else state.setdefault(self, self._make())
        return getattr(made, name)


def _serve_in_threads():
    if isinstance(session.mapped, _OfEachRank):
        return
    engine_context, tp_rank = session.engine_context, session.tp_rank
    module = session
    module.mapped = _OfEachRank(MappedMemory)
    module.receiver = _OfEachRank(GroupReceiver)
    is_ours = lambda: hasattr(_thread, "rank")  # noqa: E731
    module.engine_context = lambda model: {} if is_ours() else engine_context(model)
    module.tp_rank = lambda: _thread.rank if is_ours() else tp_rank()


class RecordingModel(nn.Module):
    """Keeps copies of what it is given.

    Attributes:
        loaded: the last sync's tensors by name, in order.
        num_loads: calls of `load_weights` in that sync.
        fails_at: the call that raises; None: none does.
        load_takes_s: every call waits as long before it reads.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.load_takes_s = 0.0
        self.fails_at = None
        self.begin()

    def begin(self):
        self.loaded = {}
        self.num_loads = 0

    def load_weights(self, weights):
        if self.num_loads - 1 == self.fails_at:  # refused before, and tried again
            raise RuntimeError(f"the engine refused bucket {self.fails_at}")
        time.sleep(self.load_takes_s)
        named = list(weights)
        if not named or named[0][0] not in self.loaded:  # else it is traced again
            call, self.num_loads = self.num_loads, self.num_loads + 1
            if call == self.fails_at:
                raise RuntimeError(f"the engine refused bucket {call}")
        for name, tensor in named:
            assert name not in self.loaded or _is_equal(self.loaded[name], tensor)
            self.loaded[name] = tensor.clone()


class ByName(nn.Module):
    """Has a parameter for each of these tensors, so that a load plan can be made, and no other."""

    def __init__(self, weights):
        super().__init__()
        for name, tensor in weights:
            parameter = nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
            self.register_parameter(name, parameter)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)


def _is_equal(one, other):
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


class ServingEngine:
    """A server that writes down what it is asked, serves sessions, and fails where told.

    Args:
        events: gets (operation, details).
        fails: operation that raises: "release", "resume weights", "resume kv_cache", "update".
        tp: number of TP ranks.

    Attributes:
        models: one for each TP rank.
        drafts: those that each session loads besides.
        refuses: why it publishes nothing when all is loaded; None: it does.
        tells_late_s: seconds from its reply to what its sessions tell of the publication.
        remarks: in every reply.
        wants_proof: a user has asked for a proof.
        checks: the setting that each TP rank was given in the last sync.
        num_published: syncs that were good on all TP ranks.
        groups: the process group of each TP rank where buckets are broadcast; else none.
        version: of the weights, as it publishes it; that of the start is "default".
    """

    def __init__(self, events=None, fails=None, *, tp=1):
        _serve_in_threads()
        self._events = [] if events is None else events
        self.fails = fails
        self.refuses = None
        self.tells_late_s = 0.0
        self.remarks: list[str] = []
        self.wants_proof = False
        self.checks = []
        self.models = [RecordingModel() for _ in range(tp)]
        self.drafts = []
        self.num_published = 0
        self.version = "default"
        self.groups = []
        self._states = [{} for _ in range(tp)]
        self._serving = {}

    def leave_groups(self):
        """Have every rank let go of its process group; it may wait there for the trainer."""
        boxes = [[group] for group in self.groups]
        self.groups = []
        for box, state in zip(boxes, self._states, strict=False):
            for made in state.values():
                if isinstance(made, GroupReceiver):
                    made.drop_group(box[0])
        for box in boxes:
            threading.Thread(target=box.clear, daemon=True).start()

    def _record(self, operation, *details):
        self._events.append((operation, *details))
        if self.fails == operation:
            raise RuntimeError(f"the engine cannot {operation}")

    def submit(self, call):
        """Do as a server does with a request; an update's reply comes when its sessions end."""
        reply = Future()
        fields = call.payload or {}
        try:
            if call.operation == operations.UPDATE:
                self._record("update", fields["weight_version"])
                self._update(fields, call.sent, reply)
                return reply
            if call.operation == operations.MODEL_INFO:
                reply.set_result({"weight_version": self.version})
                return reply
            if call.operation in (operations.LOAD_ADAPTER, operations.UNLOAD_ADAPTER):
                self._record(call.operation.path)
                reply.set_result({})
                return reply
            tags = fields["tags"]
            if call.operation == operations.RELEASE:
                self._record("release", *tags)
            else:
                assert call.operation == operations.RESUME
                self._record(" ".join(("resume", *tags)))
            reply.set_result({"stages": costs_of(tags)})
        except RuntimeError as error:
            reply.set_exception(error)
        return reply

    def _update(self, fields, sent, reply):
        assert (fields["load_format"], fields["flush_cache"]) == (SESSION_FORMAT, True)
        handles = [base64.b64decode(text) for text in fields["serialized_named_tensors"]]
        assert len(handles) == len(self.models)
        failures, version = [], fields["weight_version"]
        self.checks = [decode_descriptor(handle).manifest_check for handle in handles]
        loaded_badly: list[list[str]] = []
        agreed = (
            threading.Barrier(len(handles), action=lambda: loaded_badly.append([*failures])),
            threading.Barrier(len(handles), action=lambda: self._answer(reply, failures, version)),
        )
        for rank, handle in enumerate(handles):
            before = self._serving.get(rank)
            arguments = (rank, handle, failures, loaded_badly, agreed, before)
            self._serving[rank] = threading.Thread(target=self._serve, args=arguments, daemon=True)
            self._serving[rank].start()
        if sent is not None:
            sent.set()

    def _serve(self, rank, handle, failures, loaded_badly, agreed, before):
        if before is not None:  # a scheduler serves one request after the other
            before.join()
        _thread.state, _thread.rank = self._states[rank], rank
        model, served = self.models[rank], None
        if isinstance(model, RecordingModel):
            model.begin()
        # A gloo group with a broadcast in it is destroyed when its trainer is gone: not in this
        # thread, for which the next request waits.
        group = [self.groups[rank] if self.groups else None]
        try:
            descriptor = decode_descriptor(handle)
            senders = group[0] if descriptor.senders else None
            models = [*self.drafts, model]
            opened = session.Session(
                descriptor, models, NO_STEPS, group[0], senders, wants_proof=self.wants_proof
            )
            del senders
            opened.load()
            served = opened
            if self.refuses is not None:
                failures.append(f"TP rank {rank}: {self.refuses}")
        except Exception:
            failures.append(f"TP rank {rank}: {traceback.format_exc()}")
        threading.Thread(target=group.clear, daemon=True).start()
        have_loaded, have_ended = agreed
        have_loaded.wait()
        if loaded_badly == [[]]:
            try:
                served.await_commit()
            except Exception:
                failures.append(f"TP rank {rank}: {traceback.format_exc()}")
        have_ended.wait()
        time.sleep(self.tells_late_s)
        if served is not None:
            served.conclude(failures, "misfit" if self.refuses else "other")

    def _answer(self, reply, failures, version):
        if reply.cancelled():
            return
        if failures:
            reply.set_exception(RuntimeError("\n".join(failures)))
            return
        self.num_published += 1
        self.version = self.version if version is None else version
        reply.set_result({"success": True, "message": with_remarks(self.remarks)})


def colocated(engine, mode, ranks=None, **keys):
    """The weight sync of one trainer rank, or of one on its own, on a CPU; `keys` of the preset."""
    return colocated_sync(
        engine=engine,
        settings=settings_of(mode, **keys).for_session(),
        ranks=ranks or TrainerRanks(),
        device=torch.device("cpu"),
    )


def synced(weight_sync, weights, mode="compiled", **replicas):
    """The report of one sync."""
    report = SyncReport(mode=mode, replica=None if replicas else 0)
    asyncio.run(weight_sync.sync(weights, version="1", report=report, **replicas))
    return report


def costs_of(tags):
    """What a stage costs in a `ServingEngine` of two ranks."""
    return {tag: {"seconds": [1, 2], "gpu_bytes": [5, 5], "host_bytes": [0, 3]} for tag in tags}
