"""Real Megatron trainers, exported by real bridges, arrive bit for bit in real SGLang engines.

The reference is the engine that has loaded the Hugging Face checkpoint itself. The trainer's actor
is verl's own engine class; between the syncs its weights change, and move to the host and back.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from megatron.core.enums import ModelType
from safetensors.torch import load_file

from support.megatron_exports import build, export_of, make_checkpoint
from support.megatron_trainer import ENVIRONMENT, Layout
from support.sender import Sender
from support.served import Served, served
from support.trainer import Ranks

NUM_REPLICAS = 2
NO_GENERATION = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
"""SGLang's attention for the CPU cannot run MLA's forward."""

EMBEDDING = "model.embed_tokens.weight"
LOST = ".layers.1.self_attn.o_proj.weight"
ALTERED = ".layers.0.post_attention_layernorm.weight"

FACTORS = {
    "flattened": (0.5, 2.0),
    "compiled": (0.5, 2.0, 0.5, 2.0),
    "disaggregated": (0.5, 2.0, 0.5, 2.0),
    "disaggregated, in place": (0.5, 2.0),
}
"""By preset: what training does to the weights before each sync; in the end they are as before."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Engines of one model, and the trainers that update them, one after another.

    Attributes:
        model: what `make_assets` is told, or one of the `served_models`.
        tp: of each engine; a trainer has `NUM_REPLICAS * tp` ranks, and what its layout leaves of
            them is data parallel.
        trainers: layouts by name.
    """

    model: dict[str, Any] | str
    tp: int
    trainers: dict[str, Layout]


WORLDS = {
    "dense-tied": World(
        model={"architecture": "qwen3", "tied": True},
        tp=2,
        trainers={
            "tp2-pp2": Layout(tp=2, pp=2),
            "tp2-dp2": Layout(tp=2, offload=False),
            "mbridge-tp2-pp2": Layout(tp=2, pp=2, mbridge=True),
        },
    ),
    "moe": World(
        model={"architecture": "qwen3_moe", "layers": 4},
        tp=2,
        trainers={
            "tp2-pp2-ep2": Layout(tp=2, pp=2, ep=2),
            "pp2-ep2": Layout(pp=2, ep=2),
            "pp2-vpp2-ep2": Layout(pp=2, vpp=2, ep=2, offload=False),
            "tp2-ep2-etp2-dp2": Layout(tp=2, ep=2, etp=2),
            "mbridge-tp2-pp2-ep2": Layout(tp=2, pp=2, ep=2, mbridge=True),
        },
    ),
    "mla-moe": World(
        model="deepseek-v3",
        tp=1,
        trainers={"tp2-ep2": Layout(tp=2, ep=2, offload=False), "pp2": Layout(pp=2)},
    ),
    "vl-tied": World(
        model="qwen3-vl",
        tp=2,
        trainers={"tp2-dp2": Layout(tp=2, offload=False), "tp2-pp2": Layout(tp=2, pp=2)},
    ),
}


CASES = [(world, trainer) for world, each in WORLDS.items() for trainer in each.trainers]
pytestmark = [
    *(pytest.mark.e2e, pytest.mark.slow),
    pytest.mark.parametrize(
        ("running", "case"), CASES, indirect=True, scope="module", ids=map("-".join, CASES)
    ),
]


@dataclass(frozen=True)
class Running:
    """The engines of a world, the trainer's ranks, and what the engines loaded."""

    world: World
    model: Path
    engines: list[Served]
    ranks: Ranks
    reference: list[Any] = field(default_factory=list)

    def hashes(self):
        return [engine.hashes() for engine in self.engines]


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    world, folder = WORLDS[request.param], tmp_path_factory.mktemp(request.param)
    model, tp = make_checkpoint(folder, world.model), world.tp
    options = {"extra": ("--dtype", "bfloat16"), "variables": NO_GENERATION}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(served(folder / f"{i}", model=model, tp=tp, **options))
            for i in range(NUM_REPLICAS)
        ]
        urls = [engine.url for engine in engines]
        with Ranks(folder, urls, tp=tp, environment=ENVIRONMENT) as ranks:
            made = Running(world, model, engines, ranks)
            made.reference.extend(made.hashes())
            yield made


@dataclass(frozen=True)
class Case:
    """One trainer of a world, whose actor is built on all ranks."""

    running: Running
    trainer: str

    @property
    def world(self):
        return self.running.world

    @property
    def layout(self):
        return self.world.trainers[self.trainer]

    @property
    def is_first(self):
        """The engines had no other trainer before."""
        return self.trainer == next(iter(self.world.trainers))

    def has(self, preset):
        """With mbridge, engines elsewhere get what they get of any other export. What was offloaded
        is not in memory that other processes can map on a CPU. How an export is packed is the same
        for all trainers of a model: the first shows it.
        """
        return not (
            (self.layout.mbridge and "disaggregated" in preset)
            or (self.layout.offload and "in place" in preset)
            or (not self.is_first and preset == "flattened")
        )


@pytest.fixture(scope="module")
def case(request, running):
    case = Case(running, request.param)
    if case.layout.mbridge and not hasattr(ModelType, "encoder_and_decoder"):
        pytest.skip("mbridge 0.15.1 needs an older megatron-core, beside Megatron-Bridge 0.3.1")
    running.ranks.run(build, running.model, case.layout)
    return case


def test_the_export_is_the_checkpoint_on_every_rank(case):
    """Every tensor once, bit for bit, and where the trace says that it is, in the buffers of the
    distributed optimizer: at most one for the experts, and one for the rest, of each piece of a
    pipeline stage. Replicas of a shard are read by equally many; the ranks of one pipeline stage
    have shards of the same parameters.

    mbridge exports the copy of a tied embedding on the last pipeline stage under the same name.
    """
    layout, model = case.layout, case.running.model
    is_twice = "tied" in case.world.model and layout.pp > 1 and layout.mbridge
    names = sorted([*load_file(model / "model.safetensors"), *[EMBEDDING] * is_twice])
    for seen in case.running.ranks.run(export_of, model):
        assert sorted(seen["names"]) == names
        assert seen["different"] == []
        assert 1 <= seen["num_storages"] <= 2 * layout.vpp
        if layout.mbridge:
            assert "does not name the tensors that it reads" in seen["off"]
            continue
        assert (seen["off"], seen["misplaced"]) == (None, [])
        size = len(seen["num_served"]) // layout.pp
        for stage in range(layout.pp):
            assert len(set(seen["num_served"][stage * size : (stage + 1) * size])) == 1, seen


def begin(rank, preset, targets):
    if "disaggregated" in preset:
        rank.kept["by"] = Sender(
            rank, targets, routes=["pull", "exchange"] if "in place" in preset else ["exchange"]
        )
    else:
        rank.kept["by"] = rank.manager(preset)


def sync(rank, factor):
    """After training; the parameters are offloaded where the layout wants it. The report, with the
    number of times that verl's export loaded the parameters, and the bytes left where they were.
    """
    from verl.workers.engine.megatron import transformer_impl

    actor, by = rank.kept["actor"], rank.kept["by"]
    actor.train(factor)
    load = transformer_impl.load_megatron_model_to_gpu
    with mock.patch.object(transformer_impl, load.__name__, wraps=load) as loads:
        if isinstance(by, Sender):
            return by.sync(actor.export(), "compiled"), actor.offload()
        asyncio.run(by.release())
        asyncio.run(by.resume(("weights",)))
        asyncio.run(by.sync(actor.export(), version="v"))
    report, left_over = asdict(by.report) | {"num_loads": loads.call_count}, actor.offload()
    asyncio.run(by.resume(("kv_cache",)))
    return report, left_over


@pytest.mark.parametrize("preset", FACTORS)
def test_sync_is_bit_exact_on_every_replica(case, preset):
    if not case.has(preset):
        pytest.skip("exported or sent as another trainer's, or in test_broadcast")
    running, halved, syncs = case.running, None, []
    targets = [(engine.url, engine.tp) for engine in running.engines]
    running.ranks.run(begin, preset, targets)
    for factor in FACTORS[preset]:
        reports, left_over = zip(*running.ranks.run(sync, factor), strict=True)
        assert set(left_over) == {0 if case.layout.offload else None}
        syncs.append(reports)
        hashes = running.hashes()
        if factor == 2.0:
            assert hashes == case.running.reference
            continue
        assert hashes == (halved := halved or hashes)
        for before, after in zip(case.running.reference, hashes, strict=True):
            for old, new in zip(before, after, strict=True):
                assert old.keys() == new.keys()
                assert not [name for name in old if old[name] == new[name]]
    names = load_file(running.model / "model.safetensors")
    for first, *_ in syncs:  # where weights are broadcast, the only one that reports
        assert first["num_buckets"] > 2
        assert first["num_tensors"] == len(names)
    if preset == "compiled":
        for reports in zip(*syncs, strict=True):
            check_compiled(case, reports)
    if "disaggregated" in preset:
        check_disaggregated(case, [first for first, *_ in syncs])


def check_compiled(case, reports):
    """Nothing is exported once the engine has a plan: the engines read the ranks' shards, or these
    are exchanged.

    It has one after the first sync, unless it had a former trainer's, whose first buckets were
    alike.
    """
    *_, last = reports
    assert last["num_replayed"] == last["num_buckets"], last["eager_reason"]
    if case.world.tp > 1 and last["num_exchanged"]:
        assert last["sent_bytes"] < 0.6 * last["payload_bytes"], "a rank is sent what it reads"
    exported = [r["num_buckets"] - r["num_pulled"] - r["num_exchanged"] for r in reports]
    num_buckets = reports[0]["num_buckets"]
    if case.layout.mbridge:
        assert exported == [num_buckets] * len(reports)
        return
    is_misled = "another layout than the plan's" in (reports[0]["eager_reason"] or "")
    assert not (is_misled and case.is_first)
    num_exported = 2 if is_misled else 1
    assert exported == [num_buckets] * num_exported + [0] * (len(reports) - num_exported)
    later = reports[num_exported:]
    assert not [report for report in later if "export" in report["seconds"]]
    route = "num_exchanged" if case.layout.offload else "num_pulled"
    assert [report[route] for report in later] == [num_buckets] * len(later)
    # verl's method goes through all parameters. A proof makes an export, too.
    needs_load = [case.layout.offload or bool(report["is_proven"]) for report in later]
    assert [report["num_loads"] for report in later] == needs_load
    assert not needs_load[-1] or case.layout.offload, "no sync was without verl's method"


def check_disaggregated(case, reports):
    """Once the engines have a plan every rank sends its shards, or engines on its host read them in
    place, by the plan of the syncs before.
    """
    if len(reports) == 2:
        exported, pulled = reports
        assert exported["num_pulled"] == 0
        assert pulled["num_pulled"] == pulled["num_replayed"] == pulled["num_buckets"]
        assert pulled["staging_bytes"] == 0
        return
    is_sent = [report["num_sent"] == report["num_buckets"] for report in reports]
    assert is_sent[2:] == [True, True], reports
    for sent in zip(*reports[-1]["pair_bytes"], strict=True):  # to one engine rank
        assert sum(sent) <= 0.6 * reports[-1]["payload_bytes"] or case.world.tp == 1
        assert sum(sent) == reports[-1]["payload_bytes"] or case.world.tp > 1


def ending_in(names, ending):
    """Those of the trainer's or the engine's names, which begin otherwise in a model that sees."""
    return {name for name in names if name.endswith(ending)}


def sync_spoilt(rank, what):
    """Other weights, of which one does not come; or the checkpoint's, of which one is altered."""
    actor = rank.kept["actor"]
    actor.train(0.5 if what == "lost" else 2.0)
    weights = dict(actor.export())
    [name] = ending_in(weights, LOST if what == "lost" else ALTERED)
    if what == "lost":
        del weights[name]
    else:
        weights[name] = weights[name].detach().clone()
        weights[name].view(-1)[0] += 1
    manager = rank.manager("flattened", manifest_check="off")
    asyncio.run(manager.sync(iter(weights.items()), version=what))


def test_a_lost_or_altered_tensor_would_show(case):
    if not case.is_first:
        pytest.skip("as with the first trainer")
    for what in ("lost", "altered"):
        case.running.ranks.run(sync_spoilt, what)
        for before, after in zip(case.running.reference, case.running.hashes(), strict=True):
            for old, new in zip(before, after, strict=True):
                same = {name for name in old if old[name] == new[name]}
                lost, altered = ending_in(old, LOST), ending_in(old, ALTERED)
                assert lost
                assert altered
                assert same == (lost if what == "lost" else old.keys() - altered)
