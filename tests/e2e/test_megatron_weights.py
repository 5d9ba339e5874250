"""Real Megatron trainers, exported by real bridges, arrive bit for bit in real SGLang engines.

The reference is the engine that has loaded the Hugging Face checkpoint itself. The trainer's actor
is verl's own engine class; between the syncs its weights change, and move to the host and back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_assets import make_assets

from support import cycle_models
from support.megatron_steps import ALTERED, FACTORS, LOST, exercise_engine, presets_of
from support.megatron_trainer import ENVIRONMENT, Layout
from support.remote import Outcome, results_of
from support.sglang_server import sglang_server
from support.trainer import run_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REPLICAS = 2
NO_GENERATION = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
"""SGLang's attention for the CPU cannot run MLA's forward."""

EMBEDDING = "model.embed_tokens.weight"
ROUTER_BIAS = "e_score_correction_bias"


@dataclass(frozen=True, kw_only=True)
class World:
    """Engines of one model, and the trainers that update them, one after another.

    Attributes:
        model: what `make_assets` is told, or one of the `cycle_models`.
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
}


def make_checkpoint(folder: Path, model: dict[str, Any] | str) -> Path:
    """A tiny model in bfloat16, which is what Megatron trains, but for the routers' biases."""
    from safetensors.torch import load_file, save_file

    if isinstance(model, str):
        cycle_models.make_model(model, folder / "model")
    else:
        make_assets(folder, **model)
    file = folder / "model" / "model.safetensors"
    named = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    for name in named:
        if name.endswith(ROUTER_BIAS):
            named[name] = torch.randn(named[name].shape)
    save_file(named, file, {"format": "pt"})
    return folder / "model"


@dataclass(frozen=True)
class Case:
    """What the ranks of one trainer saw.

    Attributes:
        world: the engines, and which trainers there were.
        trainer: which of these.
        outcomes: by rank, of all trainers.
    """

    world: World
    trainer: str
    outcomes: list[Outcome]

    @property
    def layout(self) -> Layout:
        return self.world.trainers[self.trainer]

    @property
    def is_tied(self) -> bool:
        """Output layer and embedding are one."""
        return "tied" in self.world.model

    @property
    def is_first(self) -> bool:
        """The engines had no other trainer before."""
        return self.trainer == next(iter(self.world.trainers))

    @property
    def presets(self) -> list[str]:
        return presets_of(self.layout, is_first=self.is_first)

    @property
    def results(self) -> list[dict[str, Any]]:
        """One per rank: what it saw of this trainer, and of the engines before and after."""
        return [seen | seen["trainers"][self.trainer] for seen in results_of(self.outcomes)]

    @property
    def leaders(self) -> list[dict[str, Any]]:
        return self.results[:: self.world.tp]


CASES = [(world, trainer) for world, each in WORLDS.items() for trainer in each.trainers]


@pytest.fixture(scope="module")
def run_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Outcome]]:
    """Engines of a tiny model, exercised by Megatron trainers: once for each world."""

    @cache
    def run(name: str) -> list[Outcome]:
        world, folder = WORLDS[name], tmp_path_factory.mktemp(name)
        model = make_checkpoint(folder, world.model)
        with ExitStack() as stack:
            urls = []
            for replica in range(NUM_REPLICAS):
                own = folder / f"server{replica}"
                own.mkdir()
                server = sglang_server(
                    model, own, tp=world.tp, extra=("--dtype", "bfloat16"), variables=NO_GENERATION
                )
                urls.append(stack.enter_context(server).url)
            return run_trainer(
                exercise_engine,
                folder,
                str(folder),
                str(model),
                {name: msgspec.structs.asdict(each) for name, each in world.trainers.items()},
                [[url, world.tp] for url in urls],
                urls=urls,
                tp=world.tp,
                environment=ENVIRONMENT,
                timeout_s=500,
            )

    return run


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, run_world: Callable[[str], list[Outcome]]) -> Case:
    world, trainer = request.param
    return Case(WORLDS[world], trainer, run_world(world))


def test_the_export_is_the_checkpoint_on_every_rank(case: Case) -> None:
    """Every tensor once, bit for bit, and where the trace says that it is.

    mbridge exports the copy of a tied embedding on the last pipeline stage under the same name.
    """
    twice = [EMBEDDING] * (case.is_tied and case.layout.pp > 1 and case.layout.mbridge)
    for seen in case.results:
        export = seen["export"]
        assert sorted(export["names"]) == sorted([*export["checkpoint"], *twice])
        assert export["different"] == []
        if case.layout.mbridge:
            assert "does not say which tensors it reads" in export["off"]
        else:
            assert (export["off"], export["misplaced"]) == (None, [])


def test_parameters_lie_in_the_buffers_of_the_distributed_optimizer(case: Case) -> None:
    """At most one for the experts, and one for the rest, of each piece of a pipeline stage."""
    for seen in case.results:
        assert 1 <= seen["export"]["num_storages"] <= 2 * case.layout.vpp


def test_replicas_of_a_shard_are_read_by_equally_many(case: Case) -> None:
    """The ranks of one pipeline stage have shards of the same parameters."""
    for seen in case.results:
        num_served = seen["export"]["num_served"]
        if case.layout.mbridge:
            assert num_served is None
            continue
        size = len(num_served) // case.layout.pp
        for stage in range(case.layout.pp):
            assert len(set(num_served[stage * size : (stage + 1) * size])) == 1, num_served


@pytest.mark.parametrize("preset", FACTORS)
def test_sync_is_bit_exact_on_every_replica(case: Case, preset: str) -> None:
    if preset not in case.presets:
        pytest.skip("exported or sent as another trainer's, or in test_broadcast")
    for leader in case.leaders:
        reference = leader["reference"]
        assert len(reference) == case.world.tp
        hashes = [hashes for hashes, _, _ in leader[preset]]
        for before, after in zip(reference, hashes[0], strict=True):
            assert before.keys() == after.keys()
            assert not [name for name in before if before[name] == after[name]]
        assert hashes == [hashes[0], reference] * (len(FACTORS[preset]) // 2)
    first, *_ = case.leaders  # where weights are broadcast, the only one that reports
    for _, report, _ in first[preset]:
        assert report["num_buckets"] > 2
        assert report["num_tensors"] == len(set(first["export"]["names"]))


def test_the_parameters_were_offloaded_between_syncs(case: Case) -> None:
    for seen in case.results:
        for preset in case.presets:
            factors = FACTORS[preset]
            left_over = 0 if case.layout.offload else None
            assert [left for _, _, left in seen[preset]] == [left_over] * len(factors)


def test_compiled_syncs_are_replayed(case: Case) -> None:
    for leader in case.leaders:
        *_, (_, report, _) = leader["compiled"]
        assert report["num_replayed"] == report["num_buckets"], report["eager_reason"]
        if case.world.tp > 1 and report["num_exchanged"]:
            assert report["num_arranged"] > 0, "a rank is sent what it reads"
            assert report["sent_bytes"] < 0.6 * report["payload_bytes"]


def test_compiled_syncs_export_nothing(case: Case) -> None:
    """Once the engine has a plan the engines read the ranks' shards, or these are exchanged.

    It has one after the first sync, unless it had a former trainer's, whose first buckets were
    alike.
    """
    for seen in case.results:
        reports = [report for _, report, _ in seen["compiled"]]
        exported = [r["num_buckets"] - r["num_pulled"] - r["num_exchanged"] for r in reports]
        num_buckets = reports[0]["num_buckets"]
        if case.layout.mbridge:
            assert exported == [num_buckets] * len(reports)
            continue
        is_misled = "another layout than the plan's" in (reports[0]["eager_reason"] or "")
        assert not (is_misled and case.is_first)
        num_exported = 1 + is_misled
        assert exported == [num_buckets] * num_exported + [0] * (len(reports) - num_exported)
        later = reports[num_exported:]
        assert not [report for report in later if "export" in report["seconds"]]
        route = "num_exchanged" if case.layout.offload else "num_pulled"
        assert [report[route] for report in later] == [num_buckets] * len(later)


def test_every_rank_sends_its_shards_to_engines_elsewhere(case: Case) -> None:
    """Once the engines have a plan."""
    if "disaggregated" not in case.presets:
        pytest.skip("what says nothing of its parameters is broadcast: test_broadcast")
    reports = [report for _, report, _ in case.results[0]["disaggregated"]]
    is_sent = [report["num_sent"] == report["num_buckets"] for report in reports]
    assert is_sent[2:] == [True, True], reports
    for sent in zip(*reports[-1]["pair_bytes"], strict=True):  # to one engine rank
        assert sum(sent) <= 0.6 * reports[-1]["payload_bytes"] or case.world.tp == 1
        assert sum(sent) == reports[-1]["payload_bytes"] or case.world.tp > 1


def test_engines_elsewhere_on_the_host_read_every_rank_s_shards_in_place(case: Case) -> None:
    """The plan is that of the syncs before."""
    preset = "disaggregated, in place"
    if preset not in case.presets:
        pytest.skip("exported, or sent")
    exported, pulled = (report for _, report, _ in case.results[0][preset])
    assert exported["num_pulled"] == 0
    assert pulled["num_pulled"] == pulled["num_replayed"] == pulled["num_buckets"]
    assert pulled["staging_bytes"] == 0


@pytest.mark.parametrize("what", ["lost", "altered"])
def test_a_tensor_that_is_lost_or_altered_would_show(case: Case, what: str) -> None:
    for leader in case.leaders:
        for before, after in zip(leader["reference"], leader[what], strict=True):
            same = {name for name in before if before[name] == after[name]}
            assert same == ({LOST} if what == "lost" else before.keys() - {ALTERED})
