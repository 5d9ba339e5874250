"""Real Megatron trainers, exported by real bridges, arrive bit for bit in real SGLang engines.

The reference is the engine that has loaded the Hugging Face checkpoint itself. The trainer's actor
is verl's own engine class; between the syncs its weights change, and move to the host and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_assets import make_assets

from support.engine_steps import MODES
from support.megatron_steps import ALTERED, FACTORS, LOST, exercise_engine
from support.megatron_trainer import ENVIRONMENT, Layout
from support.sglang_server import sglang_server
from support.trainer import Outcome, run_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REPLICAS = 2
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class World:
    """A trainer, and the engines it updates.

    Attributes:
        architecture: of the model.
        tied: output layer and embedding are one.
        layout: of the trainer.
        tp: of each engine; the trainer has `NUM_REPLICAS * tp` ranks.
        other: a model and a layout of the same ranks whose export alone is looked at.
    """

    architecture: str
    tied: bool
    layout: Layout
    tp: int
    other: tuple[str, bool, Layout]


WORLDS = {
    "dense-tied-tp2-pp2": World(
        architecture="qwen3",
        tied=True,
        layout=Layout(tp=2, pp=2),
        tp=2,
        other=("qwen3_moe", False, Layout(tp=2, pp=2, ep=2)),
    ),
    "moe-tp2-ep2": World(
        architecture="qwen3_moe",
        tied=False,
        layout=Layout(tp=2, ep=2, offload=False),
        tp=1,
        other=("qwen3", True, Layout(pp=2)),
    ),
    "mbridge-dense-tied-tp2-pp2": World(
        architecture="qwen3",
        tied=True,
        layout=Layout(tp=2, pp=2, mbridge=True),
        tp=2,
        other=("qwen3_moe", False, Layout(tp=2, pp=2, ep=2, mbridge=True)),
    ),
}


def make_model(folder: Path, architecture: str, *, tied: bool) -> Path:
    """A tiny checkpoint in bfloat16, which is what Megatron trains."""
    from safetensors.torch import load_file, save_file

    make_assets(folder, architecture=architecture, tied=tied)
    file = folder / "model" / "model.safetensors"
    named = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    save_file(named, file, {"format": "pt"})
    return folder / "model"


@dataclass(frozen=True)
class Case:
    """What the ranks of a world saw."""

    world: World
    outcomes: list[Outcome]

    @property
    def results(self) -> list[dict[str, Any]]:
        """One per rank."""
        assert [outcome.error for outcome in self.outcomes] == [None] * len(self.outcomes)
        return [outcome.result for outcome in self.outcomes]

    @property
    def leaders(self) -> list[dict[str, Any]]:
        """One per replica."""
        return self.results[:: self.world.tp]


@pytest.fixture(scope="module", params=WORLDS.values(), ids=WORLDS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """Servers of a tiny model, exercised by a Megatron world."""
    world: World = request.param
    folder = tmp_path_factory.mktemp("megatron")
    model = make_model(folder / "served", world.architecture, tied=world.tied)
    architecture, tied, layout = world.other
    other = make_model(folder / "other", architecture, tied=tied)
    with ExitStack() as stack:
        urls = []
        for replica in range(NUM_REPLICAS):
            own = folder / f"server{replica}"
            own.mkdir()
            server = sglang_server(model, own, tp=world.tp, extra=("--dtype", "bfloat16"))
            urls.append(stack.enter_context(server).url)
        outcomes = run_trainer(
            exercise_engine,
            folder,
            str(folder),
            str(model),
            msgspec.structs.asdict(world.layout),
            [(str(other), msgspec.structs.asdict(layout))],
            urls,
            urls=urls,
            tp=world.tp,
            environment=ENVIRONMENT,
            timeout_s=400,
        )
    yield Case(world, outcomes)


def check_export(seen: dict[str, Any], layout: Layout, *, tied: bool) -> None:
    """Every tensor of the checkpoint once, bit for bit, and where the trace says that it is.

    mbridge exports the copy of a tied embedding on the last pipeline stage under the same name.
    """
    twice = [EMBEDDING] * (tied and layout.pp > 1 and layout.mbridge)
    assert sorted(seen["names"]) == sorted([*seen["checkpoint"], *twice])
    assert seen["different"] == []
    if layout.mbridge:
        assert "does not say which tensors it reads" in seen["off"]
    else:
        assert (seen["off"], seen["misplaced"]) == (None, [])


def test_the_export_is_the_checkpoint_on_every_rank(case: Case) -> None:
    _, other_tied, other_layout = case.world.other
    for seen in case.results:
        check_export(seen["export"], case.world.layout, tied=case.world.tied)
        (other,) = seen["others"]
        check_export(other, other_layout, tied=other_tied)


@pytest.mark.parametrize("mode", MODES)
def test_sync_is_bit_exact_on_every_replica(case: Case, mode: str) -> None:
    for leader in case.leaders:
        reference = leader["reference"]
        assert len(reference) == case.world.tp
        hashes = [hashes for hashes, _, _ in leader[mode]]
        for before, after in zip(reference, hashes[0], strict=True):
            assert before.keys() == after.keys()
            assert not [name for name in before if before[name] == after[name]]
        assert hashes == [hashes[0], reference] * (len(FACTORS[mode]) // 2)
        for _, report, _ in leader[mode]:
            assert report["num_buckets"] > 2
            assert report["num_tensors"] == len(set(leader["export"]["names"]))


def test_the_parameters_were_offloaded_between_syncs(case: Case) -> None:
    for seen in case.results:
        for mode in MODES:
            left_over = 0 if case.world.layout.offload else None
            assert [left for _, _, left in seen[mode]] == [left_over] * len(FACTORS[mode])


def test_compiled_syncs_are_replayed(case: Case) -> None:
    for leader in case.leaders:
        *_, (_, report, _) = leader["compiled"]
        assert report["num_replayed"] == report["num_buckets"], report["eager_reason"]
        if case.world.tp > 1:
            assert report["num_arranged"] > 0, "a rank is sent what it reads"
            assert report["sent_bytes"] < 0.6 * report["payload_bytes"]


def test_compiled_syncs_export_nothing(case: Case) -> None:
    """The second sync already: the engines read the ranks' shards, or these are exchanged."""
    for seen in case.results:
        reports = [report for _, report, _ in seen["compiled"]]
        exported = [r["num_buckets"] - r["num_pulled"] - r["num_exchanged"] for r in reports]
        if case.world.layout.mbridge:
            assert exported == [report["num_buckets"] for report in reports]
            continue
        assert exported == [reports[0]["num_buckets"], 0, 0, 0]
        route = "num_exchanged" if case.world.layout.offload else "num_pulled"
        assert [r[route] for r in reports] == [0] + [r["num_buckets"] for r in reports[1:]]
        assert not [report for report in reports[1:] if "export" in report["seconds"]]


def test_every_rank_sends_its_shards_to_engines_elsewhere(case: Case) -> None:
    """To all replicas at once, and bit-exact; what says nothing of its parameters is broadcast."""
    syncs = case.results[0]["disaggregated"]
    references = [leader["reference"] for leader in case.leaders]
    assert [hashes for hashes, _ in syncs] == [syncs[0][0], references] * 2
    assert syncs[0][0] != references
    is_sent = [report["num_sent"] == report["num_buckets"] for _, report in syncs]
    if case.world.layout.mbridge:
        assert not any(report["num_sent"] for _, report in syncs)
        return
    assert is_sent == [False, True, True, True]
    *_, (_, report) = syncs
    for sent in zip(*report["pair_bytes"], strict=True):
        assert sum(sent) <= 0.6 * report["payload_bytes"] or case.world.tp == 1
        assert sum(sent) == report["payload_bytes"] or case.world.tp > 1


def test_a_lost_tensor_would_show(case: Case) -> None:
    for leader in case.leaders:
        for before, after in zip(leader["reference"], leader["lost"], strict=True):
            assert [name for name in before if before[name] == after[name]] == [LOST]


def test_an_altered_tensor_would_show(case: Case) -> None:
    for leader in case.leaders:
        for before, after in zip(leader["reference"], leader["altered"], strict=True):
            assert [name for name in before if before[name] != after[name]] == [ALTERED]
