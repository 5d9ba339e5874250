"""What one rank exports reaches its engine bit by bit; what is held, counted, and said of it."""

import math
from dataclasses import replace
from threading import Event
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_loader.load_plan.executor import PlanExecutor, TableRun
from sglang_loader.session import serve
from support.settings import settings_of
from unit.serving_engine import ByName, ServingEngine, colocated, synced
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.report import warn_once
from verl_sglang_sync.routes.route import NOT_TRACEABLE, Route, RouteContext, RouteState
from verl_sglang_sync.routes.staging_ring import StagingRing
from verl_sglang_sync.routes.table.table_route import TableRoute
from verl_sglang_sync.sources import source_map
from verl_sglang_sync.sources.comparison import Comparison
from verl_sglang_sync.sources.export import Reexport
from verl_sglang_sync.sources.export_trace import NotTraceable, trace_export
from verl_sglang_sync.trainer_ranks import TrainerRanks

MODES = ("flattened",)
both_modes = pytest.mark.parametrize("mode", MODES)


class Trainer:
    """A rank on its own, and its engine."""

    def __init__(self, mode):
        self.engine = ServingEngine()
        self.mode = mode
        options = {"manifest_check": "off", "free_cache_engine": False, "request_timeout_s": 20}
        self.weight_sync = colocated(self.engine, mode, bucket_bytes=1024, **options)

    def sync(self, weights):
        """One sync; its report."""
        return synced(self.weight_sync, iter(weights), self.mode)

    def received(self, weights):
        """What the engine's `load_weights` saw in one sync: contents by name, in order."""
        self.sync(weights)
        return {name: content(t) for name, t in self.engine.models[0].loaded.items()}


@pytest.fixture(scope="module")
def trainers():
    """One of each mode, for one sync after the other."""
    return {mode: Trainer(mode) for mode in MODES}


def content(tensor):
    """Everything that must arrive: dtype, shape, and the bytes in logical order."""
    with torch.no_grad():
        raw = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(raw.tolist())


def contents(weights):
    return {name: content(tensor) for name, tensor in weights}


DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
)


def filled(shape, dtype, seed=0):
    """Random bytes as a tensor; for bool random truth values."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, high, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


LAYOUTS = {
    "dense": filled,
    "transposed": lambda shape, *more: filled(shape[::-1], *more).permute(
        tuple(range(len(shape)))[::-1]
    ),
    "a row of a bigger one": lambda shape, *more: filled((3, *shape), *more)[1],
    "every second column": lambda shape, *more: filled((*shape, 2), *more)[..., 1],
    "expanded": lambda shape, *more: filled(shape[1:], *more).expand(shape),
}


@st.composite
def exports(draw):
    weights = []
    for index in range(draw(st.integers(1, 12))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        layout = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))]
        weights.append((f"model.{index}", layout(shape, draw(st.sampled_from(DTYPES)), index)))
    return weights


TIED = torch.ones(4, 4)
ROWS = nn.Parameter(filled((8, 4), torch.float32)).chunk(2)


@both_modes
@settings(max_examples=30)
@given(weights=exports())
@example(weights=[("model.embed_tokens.weight", TIED), ("lm_head.weight", TIED)])
@example(weights=[("upper", ROWS[0]), ("lower", ROWS[1])])
@example(weights=[("a", torch.ones(256)), ("b", torch.ones(256)), ("giant", torch.ones(10, 256))])
def test_what_arrives_is_what_was_exported(trainers, mode, weights):
    assert trainers[mode].received(weights) == contents(weights)


def noted(seen):
    """An export of three buckets that writes down how far it came."""
    for i in range(12):
        seen.append(i)
        yield f"t{i}", torch.ones(64)
    seen.append("end")


@both_modes
def test_a_failed_sync_drains_a_failing_export(mode):
    seen, trainer = [], Trainer(mode)

    def export():
        yield from noted(seen)
        raise RuntimeError("and the export broke as well")

    trainer.engine.models[0].fails_at = 0
    with pytest.raises(WeightSyncError, match="the engine refused") as error:
        trainer.sync(export())
    assert seen == [*range(12), "end"]
    assert "rank 0: Traceback" in str(error.value)


@both_modes
def test_a_rank_without_buffer_memory_fails_normally(mode, monkeypatch):
    """They are allocated anew in each sync; the other ranks wait in the export's collectives."""
    seen, trainer = [], Trainer(mode)
    trainer.sync(noted([]))
    with monkeypatch.context() as patched:
        patched.setattr(StagingRing, "_reserve", Mock(side_effect=MemoryError("no room")))
        with pytest.raises(WeightSyncError, match=r"(?s)rank 0: Traceback.*MemoryError: no room"):
            trainer.sync(noted(seen))
    assert seen == [*range(12), "end"]
    trainer.sync(noted([]))


@both_modes
@pytest.mark.parametrize("is_fused", (False, True))
def test_only_a_bucket_and_a_tensor_are_held(mode, is_fused):
    refs, alive = [], []

    def export():
        for index in range(12):
            tensor = torch.ones(2 if is_fused else 1, 64)
            refs.append(StorageWeakRef(tensor.untyped_storage()))
            alive.append(sum(not ref.expired() for ref in refs))
            for i, row in enumerate(tensor):
                yield f"t{index}.{i}", row
                del row
            del tensor

    Trainer(mode).sync(export())
    assert len(refs) == 12
    assert max(alive) == (3 if is_fused else 5)  # four rows make a bucket, the fifth closes it


def test_an_export_without_parameters_is_packed(caplog):
    warn_once.cache_clear()
    weights = [(f"t{i}", filled((8, 16), torch.bfloat16, i)) for i in range(9)]
    trainer = Trainer("compiled")
    trainer.engine.models = [ByName(weights)]
    for _ in range(3):
        assert trainer.sync(weights).num_pulled == 0
    said = [record.getMessage() for record in caplog.records]
    assert said.count(NOT_TRACEABLE) == 1


class Learns(Route):
    """A route that looks at each exported sync, and is never prepared."""

    fallback_text = "never"

    def __init__(self):
        settings = settings_of("compiled")
        context = RouteContext(TrainerRanks(), torch.device("cpu"), settings, lambda: ())
        super().__init__(context)
        self.loaded = []

    def can_learn(self, weights):
        return True

    def learn(self, export):
        self.loaded = export.loaded


class Rebinds(ByName):
    """No load plan can be made of it."""

    def load_weights(self, weights):
        super().load_weights(weights)
        for name, parameter in list(self.named_parameters()):
            self.register_parameter(name, nn.Parameter(parameter.clone(), requires_grad=False))


@pytest.mark.parametrize("is_draft", (True, False))
def test_the_model_without_a_plan_is_named(is_draft):
    weights = [(f"t{i}", torch.ones(64)) for i in range(3)]
    trainer, route = Trainer("compiled"), Learns()
    planless, planned = Rebinds(weights), ByName(weights)
    trainer.engine.drafts = [planless if is_draft else planned]
    trainer.engine.models = [planned if is_draft else planless]
    trainer.weight_sync._route = route
    for _ in range(2):
        assert "rebinds tensors" in trainer.sync(weights).eager_reason
        assert not route.loaded[0].has_plan


class Traceable:
    """A trainer of one rank whose export names its parameters, and its engine.

    Attributes:
        parameters: by name; each is a bucket of its own.
        sources: of the export.
        num_exports: those that were begun, traced ones among them.
        fails_at: the export that raises; None: none does.
    """

    def __init__(self):
        self.parameters = {f"t{i}": torch.full((256,), i, dtype=torch.float32) for i in range(4)}
        for tensor in self.parameters.values():
            tensor.untyped_storage().share_memory_()
        self.sources, self.num_exports, self.fails_at = lambda: self.parameters, 0, None
        self.trainer = Trainer("compiled")
        self.model = ByName(self.parameters.items())
        self.trainer.engine.models = [self.model]
        self.route = self.trainer.weight_sync._route

    def sync(self):
        return synced(self.trainer.weight_sync, Reexport(self._export, sources=self.sources))

    def _export(self):
        self.num_exports += 1
        yield from self.parameters.items()
        if self.num_exports == self.fails_at:
            raise RuntimeError("the export broke")

    def has_arrived(self):
        return contents(self.model.named_parameters()) == contents(self.parameters.items())


def test_comparison_overlaps_the_previous_buckets_load(monkeypatch):
    case, compared, was_in_time = Traceable(), [Event() for _ in range(4)], []
    add, load = Comparison.add, case.model.load_weights

    def added(comparison, named):
        named = list(named)
        add(comparison, named)
        compared[int(named[0][0][1:])].set()

    def loading(weights):
        named = list(weights)
        following = min(int(named[0][0][1:]) + 1, 3)
        was_in_time.append(compared[following].wait(5))
        load(named)

    monkeypatch.setattr(Comparison, "add", added)
    monkeypatch.setattr(case.model, "load_weights", loading)
    report = case.sync()
    assert was_in_time and all(was_in_time)
    assert case.route.state is RouteState.PROVEN and report.is_proven
    assert report.seconds["learn"] > 0 and report.seconds["prove"] > 0
    assert case.sync().num_pulled == 4 and case.has_arrived()


def test_a_difference_warns_once_and_prevents_pull(monkeypatch, caplog):
    case, trace = Traceable(), source_map.trace_export

    def spoiled(*args, **kwargs):
        traced = trace(*args, **kwargs)
        return replace(traced, tensors={**traced.tensors, "t1": traced.tensors["t2"]})

    monkeypatch.setattr(source_map, "trace_export", spoiled)
    for _ in range(3):
        assert case.sync().num_pulled == 0 and case.has_arrived()
    said = [text for text in caplog.messages if TableRoute.fallback_text in text]
    assert said == [f"weight sync: {TableRoute.fallback_text} (from now on): {case.route.reason}"]
    assert "t1 is exported with other bytes than its parameter has" in said[0]


def test_a_parameter_replaced_during_export_is_retraced(monkeypatch):
    case = Traceable()
    case.parameters["t3"] = case.parameters["t2"]  # tied
    add = Comparison.add

    def added(comparison, named):
        add(comparison, named)
        case.parameters["t3"] = case.parameters["t2"].clone()
        case.parameters["t3"].untyped_storage().share_memory_()

    with monkeypatch.context() as patched:
        patched.setattr(Comparison, "add", added)
        case.sync()
    assert case.route.reason is None
    assert case.sync().num_pulled == 4 and case.has_arrived()


class SelfTracing:
    """Sources that trace themselves; `seen`: exports and publications until then, each time."""

    def __init__(self, case):
        self._case, self.seen = case, []

    def __call__(self):
        return self._case.parameters

    def trace(self, device):
        self.seen.append((self._case.num_exports, self._case.trainer.engine.num_published))
        weights = self._case.parameters.items()
        return trace_export(weights, sources=self, world_size=1, device=device)


def test_sources_traced_in_the_export_export_once():
    case = Traceable()
    case.sources = sources = SelfTracing(case)
    sources.trace_in_export = sources.trace
    case.sync()
    assert case.sources.seen == [(1, 0)]
    assert case.num_exports == 1
    assert case.sync().num_pulled == 4 and case.has_arrived()


def test_sources_not_traceable_in_the_export_export_again(caplog):
    """A trace that lacks what the export leaves, as a release of a bridge might."""
    case = Traceable()
    case.sources = sources = SelfTracing(case)
    sources.trace_in_export = Mock(side_effect=NotTraceable("the export communicates"))
    case.sync()
    assert sources.seen == [(1, 0)]
    assert case.num_exports == 2
    said = [text for text in caplog.messages if "made once more to be compared" in text]
    assert len(said) == 1 and "the export communicates. So" in said[0]
    assert case.sync().num_pulled == 4 and case.has_arrived()


def test_self_tracing_sources_trace_before_their_export():
    case = Traceable()
    case.sources = SelfTracing(case)
    case.sync()
    assert case.sources.seen == [(0, 0)]
    assert case.num_exports == 1
    assert case.sync().num_pulled == 4 and case.has_arrived()
    case.route.forget()
    case.sync()
    assert (len(case.sources.seen), case.num_exports) == (1, 2), "the trace is known"


def test_a_broken_repeated_export_fails_no_sync():
    case = Traceable()
    case.sources, case.fails_at = SelfTracing(case), 2
    case.sources.trace_in_export = Mock(side_effect=NotTraceable("the export communicates"))
    assert case.sync().num_pulled == 0
    assert case.has_arrived() and "the export broke" in case.route.reason
    assert case.sync().num_pulled == 0, "the export that is tried again, and learnt from"
    assert case.sync().num_pulled == 4 and case.has_arrived()


@pytest.mark.parametrize("fails", (False, True))
def test_preparation_overlaps_the_last_buckets_load(monkeypatch, fails):
    """It has been told by then that this is the last. A sync that fails then is made again."""
    case, is_told, is_prepared, events = Traceable(), Event(), Event(), []
    finish, prepare = serve.Session._finish, case.route.prepare_to_learn

    def finished(session, message):
        first = not is_told.is_set()
        is_told.set()
        assert is_prepared.wait(5)
        if fails and first:
            raise RuntimeError("the engine broke")
        return finish(session, message)

    def prepared(weights):
        assert is_told.wait(5)
        prepare(weights)
        events.append("prepared")
        is_prepared.set()

    with monkeypatch.context() as patched:
        patched.setattr(serve.Session, "_finish", finished)
        patched.setattr(case.route, "prepare_to_learn", prepared)
        assert case.sync().num_pulled == 0
    assert events == ["prepared"] * (1 + fails)
    assert case.route.state is RouteState.PROVEN
    assert case.sync().num_pulled == 4 and case.has_arrived()


def test_after_a_refuted_route_exports_load_eagerly(monkeypatch, caplog):
    """The plan may be at fault as well, which `load_weights` is not."""
    case = Traceable()

    def spoiled(method):
        def wrong(executor, *arguments):
            method(executor, *arguments)
            with torch.no_grad():
                case.model.t2[3] += 1

        return wrong

    monkeypatch.setattr(PlanExecutor, "replay", spoiled(PlanExecutor.replay))
    monkeypatch.setattr(TableRun, "begin", spoiled(TableRun.begin))
    for _ in range(3):
        report = case.sync()
        assert case.route.state is RouteState.OFF and case.has_arrived()
        assert report.num_replayed == 0
    assert "left by the route or by the load plan: t2" in report.eager_reason
