"""What verl's FSDP engine exports through our wrapper is what SGLang loads from the checkpoint.

Each tiny architecture's checkpoint is loaded by transformers, as verl's engine does, and sharded by
FSDP2. SGLang's model loads the checkpoint, then another one, then the export: every storage that
the model reaches must hold the same bytes as after the checkpoint.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from contract.load_plan_proof import load_eagerly
from contract.tiny_architecture_cases import CASES, case_named
from contract.tiny_architectures import (
    CannotBuild,
    Ranks,
    build_model,
    finish_loading,
    prepare_process,
    random_weights,
    save_checkpoint,
    start_world,
    stop_process_groups,
    without_hub_kernels,
)
from contract.weight_check_proof import check, specs_of
from sglang_loader.load_plan.destinations import collect_destinations
from support.assembled import misplaced
from support.plan_check import differing, snapshot
from verl_sglang_sync.sources.source_map import SourceMap
from verl_sglang_sync.trainer_ranks import TrainerRanks
from verl_sglang_sync.verl import exports

prepare_process()

CPU = torch.device("cpu")
OTHER_THAN_THE_MODELS = (
    "qwen2_5-vl",
    "gemma3",
    "mixtral",
    "gpt-oss",
    "qwen2-vl",
    "mistral3",
    "mllama",
    "paddleocr-vl",
    "phimoe",
    "ernie4_5-moe",
    "minimax-m2",
    "lfm2-moe",
    "nemotron-h",
    "gpt2",
    "gpt-bigcode",
)
"""Whose checkpoints have other names or layouts than verl's own export, or one tensor less."""

FIRST = OTHER_THAN_THE_MODELS[:4]
LATER = [pytest.param(n, marks=pytest.mark.slow) for n in OTHER_THAN_THE_MODELS[4:]]
OTHERS = [
    pytest.param(case.name, marks=pytest.mark.slow)
    for case in CASES
    if case.name not in OTHER_THAN_THE_MODELS
]


@pytest.fixture(scope="module")
def rendezvous(tmp_path_factory):
    from verl.workers.engine.fsdp import transformer_impl

    with pytest.MonkeyPatch.context() as patch:  # in this process verl finds no accelerator
        patch.setattr(transformer_impl, "get_device_id", lambda: CPU)
        patch.setattr(transformer_impl, "log_gpu_memory_usage", lambda *_, **__: None)
        yield tmp_path_factory.mktemp("ranks") / "rendezvous"
    stop_process_groups()


@pytest.fixture
def checkpoint(request, rendezvous, tmp_path):
    """One architecture, the folder with its checkpoint, and the tensors in that."""
    case = case_named(request.param)
    weights = random_weights(save_checkpoint(case, tmp_path), 1)
    contiguous = {name: tensor.contiguous() for name, tensor in weights}
    save_file(contiguous, tmp_path / "model.safetensors", {"format": "pt"})
    start_world(Ranks(rendezvous))
    return SimpleNamespace(case=case, folder=tmp_path, weights=weights)


def trained(checkpoint):
    """The model of the checkpoint as verl's FSDP2 engine has it, and what that exports."""
    with without_hub_kernels():
        model = getattr(transformers, checkpoint.case.model).from_pretrained(
            checkpoint.folder, dtype=torch.bfloat16
        )
    mesh = init_device_mesh("cpu", (1,))
    for layer in (m for m in model.modules() if type(m).__name__.endswith("Layer")):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    from verl.workers.engine import FSDPEngine

    engine = object.__new__(FSDPEngine)
    engine.module = model
    engine.model_config = SimpleNamespace(lora={}, hf_config=model.config)
    engine._uses_fsdp2_cpu_offload_policy = engine._is_offload_param = engine._qat_enabled = False
    method = inspect.unwrap(FSDPEngine.get_per_tensor_param)
    export, _ = exports._repeatable(method)(engine)
    return export


@pytest.mark.parametrize("checkpoint", [*FIRST, *LATER, *OTHERS], indirect=True)
def test_the_export_loads_as_the_checkpoint_does(checkpoint, rendezvous):
    try:
        model = build_model(checkpoint.case, checkpoint.folder, Ranks(rendezvous))
    except CannotBuild as reason:
        pytest.skip(str(reason))
    load_eagerly(model, [checkpoint.weights])
    finish_loading(model)
    load_eagerly(model, [checkpoint.weights])
    memory = collect_destinations(model)
    expected = snapshot(memory)
    load_eagerly(model, [random_weights(checkpoint.weights, 2)])
    assert differing(memory, expected), "the control"
    export = trained(checkpoint)
    exported = list(export)
    verdict = check(model, specs_of(exported), published=specs_of(checkpoint.weights))
    assert verdict.fits, verdict.text()
    load_eagerly(model, [exported])
    assert differing(memory, expected) == ()

    ranks = TrainerRanks(timeout_s=60, tp_mesh=init_device_mesh("cpu", (1,)))
    source_map = SourceMap(ranks, CPU)
    assert source_map.trace(export) is None
    assert misplaced(export, source_map, ranks) == []
