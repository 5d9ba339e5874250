"""A replayed load plan leaves the bytes that SGLang's own `load_weights` leaves.

On every model class that a CPU can build, for two bucket layouts: trace with one set of random
weights, prove the plan with its own self-check, then load a second set eagerly, go back to the
first, replay the second, and compare every storage that the model reaches (`load_plan_proof`).
`make test` does so on the `DIVERSE` ones, `make test-slow` on all.
"""

import dataclasses

import pytest
import transformers

from contract.load_plan_proof import LAYOUTS, prove, prove_inferred
from contract.tiny_architecture_cases import CASES, case_named
from contract.tiny_architectures import CannotBuild, Ranks, prepare_process, stop_process_groups
from contract.tiny_engine import TinyEngine
from contract.weight_check_proof import check
from sglang_loader.load_plan.compiler import compile_bucket, join_buckets
from sglang_loader.load_plan.tracer import trace_bucket
from sglang_loader.load_plan.uses import uses_of
from sglang_loader.session.findings import Verdict
from support.plan_check import packed, planned, uncovered

prepare_process()
pytestmark = pytest.mark.usefixtures("training_ahead")

RENAMED_LAYERS = {"nemotron-h": "sglang: ValueError: layers_block_type contains invalid types: {"}
"""What cannot be built, and how the reason begins, where transformers saves names of layers that
SGLang's own configuration class does not take.
"""

WITHOUT_EXPERTS = {"llama4-text"}
"""SGLang's loader of the class drops all experts of every checkpoint."""

DIVERSE = (
    "qwen3",  # dense
    "qwen2-tied",
    "qwen3-moe",
    "deepseek-v3",  # MLA
    "qwen3-next",  # hybrid
    "qwen2_5-vl",  # vision
    "glm4",  # partial rotary
    "phi3",  # fused qkv
)
SOME = [case_named(name) for name in DIVERSE]
TRACED_WHOLE = {"deepseek-v3", "qwen3-next"}
"""Those of them of which no plan is inferred: each load derives weights of all layers, and the two
layers are of two kinds.
"""

_proved = {}
_not_built = {}


@pytest.fixture(scope="module")
def rendezvous(tmp_path_factory):
    yield tmp_path_factory.mktemp("ranks") / "rendezvous"
    stop_process_groups()


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(case, id=case.name) for case in SOME),
        *(pytest.param(case, id=f"all-{case.name}", marks=pytest.mark.slow) for case in CASES),
    ],
)
def built(request, rendezvous, tmp_path_factory):
    try:
        yield TinyEngine(request.param, tmp_path_factory.mktemp("checkpoint"), Ranks(rendezvous))
    except CannotBuild as reason:
        _not_built[request.param.name] = str(reason)
        pytest.skip(str(reason))


@pytest.mark.parametrize("uses_plan", [False, True])
def test_a_complete_checkpoint_fits(built, uses_plan):
    specs = built.specs
    verdict = check(built.model, specs, published=specs, uses_plan=uses_plan)
    assert verdict == Verdict()
    blind = check(built.model, specs, published=None, uses_plan=uses_plan)
    assert blind.not_checked is None
    assert blind.fits is (built.name not in WITHOUT_EXPERTS), blind
    random = check(built.model, specs, published=specs, uses_plan=uses_plan, starts_random=True)
    assert random.fits is (built.name not in WITHOUT_EXPERTS), random
    half = check(built.model, specs[::2], published=None, uses_plan=uses_plan)
    assert half.missing or half.doubtful or half.mismatched


@pytest.mark.parametrize("how", LAYOUTS)
def test_replay_is_byte_identical(built, how):
    prove(built.model, built.first, built.second, how)
    _proved.setdefault(built.name, set()).add(how)


def test_an_inferred_plan_is_the_traced_plan(built):
    num_inferred = prove_inferred(built.model, built.first)
    if built.name in {case.name for case in SOME}:
        assert (num_inferred > 0) is (built.name not in TRACED_WHOLE)


@pytest.mark.parametrize(
    "cases", [pytest.param(SOME, id="some"), pytest.param(CASES, id="all", marks=pytest.mark.slow)]
)
def test_every_architecture_was_proved_but_those_named(cases):
    """Guards against a suite that skips everything; only where all of these architectures ran."""
    names = {case.name for case in cases}
    if names - _proved.keys() - _not_built.keys():
        pytest.skip("only a part of the architectures was selected, or some failed")
    renames = hasattr(transformers.configuration_utils, "remap_legacy_layer_types")
    not_built = RENAMED_LAYERS if renames else {}
    assert _not_built.keys() & names == not_built.keys() & names, _not_built
    assert all(reason.startswith(not_built[name]) for name, reason in _not_built.items())
    assert all(len(layouts) == len(LAYOUTS) for layouts in _proved.values()), _proved


def test_a_boundary_between_two_halves_is_reported(rendezvous, tmp_path):
    """MLA joins `q_a_proj` and `kv_a_proj_with_mqa` within one call, and drops a lone half.

    The plan is as wrong as the eager loader, to the byte; what it can do is name both halves.
    """
    case = case_named("deepseek-v3")
    built = TinyEngine(case, tmp_path, Ranks(rendezvous))
    halves = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    names = [n for n, _ in built.first if n.endswith(halves)]
    parted = [item for item in built.first if not item[0].endswith(halves[1])]
    rest = [item for item in built.first if item[0].endswith(halves[1])]
    load_weights = built.model.load_weights
    traces = [trace_bucket(built.model, load_weights, *packed(bucket)) for bucket in (parted, rest)]
    plan = join_buckets([compile_bucket(t) for t in traces], traces[-1].destinations)
    assert sorted(name for traced in traces for name in uses_of(traced).unused) == sorted(names)
    fused = [n for n in uncovered(plan, "parameter") if "fused_qkv_a_proj_with_mqa" in n]
    assert len(fused) == 2
    whole = planned(built.model, packed(built.first))
    padded = {"model.embed_tokens.weight", "lm_head.weight"}  # by rows that the loader sets to 0
    assert set(uncovered(whole, "parameter")) <= padded


def test_hundreds_of_experts_become_a_few_copies(rendezvous, tmp_path):
    """128 experts a layer under the names of Qwen3-30B-A3B: ten copies a layer and three more."""
    case = case_named("qwen3-moe")
    case = dataclasses.replace(case, options={**case.options, "num_experts": 128})
    built = TinyEngine(case, tmp_path, Ranks(rendezvous))
    assert len(built.first) == 2 * (3 * 128 + 9) + 3
    order = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}

    def as_exported(item):
        prefix, experts, rest = item[0].partition(".experts.")
        expert, _, kind = rest.partition(".")
        return (prefix, int(expert), order[kind.split(".")[0]]) if experts else (prefix, -1, 0)

    plan = prove(
        built.model, sorted(built.first, key=as_exported), sorted(built.second, key=as_exported),
        "single",
    )  # fmt: skip
    assert plan.num_copies <= 2 * 10 + 3
