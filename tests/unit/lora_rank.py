"""One trainer rank in the tests of merged LoRA: real FSDP2, PEFT's adapters, verl's engine."""

import copy
import inspect
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CPU = torch.device("cpu")
BIASED = ["q_proj", "k_proj"]
DENSE = [*BIASED, "o_proj", "down_proj"]
OTHER = [*DENSE, "embed_tokens", "lm_head", "conv1d", "conv2d", "conv3d"]
CASES = {
    "linear": {"target_modules": "all-linear"},
    "rslora": {"target_modules": DENSE, "use_rslora": True},
    "lora-bias": {"target_modules": BIASED, "lora_bias": True},
    "patterns": {
        "target_modules": DENSE,
        "rank_pattern": {"o_proj": 2},
        "alpha_pattern": {"q_proj": 9},
    },
    "other": {"target_modules": OTHER},
    "dora": {"target_modules": OTHER, "use_dora": True},
    "two-adapters": {"target_modules": DENSE, "adapters": 2},
    "two-of-dora": {"target_modules": DENSE, "use_dora": True, "adapters": 2},
    "tied": {"target_modules": DENSE, "tied": True},
}
MOE_CASES = {
    "moe": {"target_modules": ["q_proj", "v_proj"]},
    "moe-experts": {"target_modules": "all-linear"},
    "moe-parameters": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj"],
    },
    "moe-of-two": {"target_modules": "all-linear", "adapters": 2},
}
"""transformers 5 keeps all experts of a layer in two parameters."""


def base_model(*, is_moe=False, tied=False):
    """A tiny Qwen2 with convolutions and a buffer, or a Qwen3 MoE."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

    shared = {
        "vocab_size": 83,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 40,
        "tie_word_embeddings": tied,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    if is_moe:
        config = Qwen3MoeConfig(**shared, **experts, head_dim=8)
        return AutoModelForCausalLM.from_config(config)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**shared))
    for layer in model.model.layers:
        layer.conv1d = nn.Conv1d(8, 6, 3)
        layer.conv2d = nn.Conv2d(8, 6, 3)
        layer.conv3d = nn.Conv3d(8, 6, 3)
    model.model.layers[0].register_buffer("count", torch.arange(3))
    return model


def adapted(dtype, *, is_moe=False, tied=False, adapters=1, **options):
    """A tiny model with random adapters, the same on all ranks."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    model = base_model(is_moe=is_moe, tied=tied)
    lora = LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **options)
    names = ["default", "second"][:adapters]
    # Other tests have a stand-in for Transformer Engine in these processes.
    with mock.patch("peft.tuners.lora.te.is_te_pytorch_available", return_value=False):
        model = get_peft_model(model, lora)
        for name in names[1:]:
            model.add_adapter(name, lora)
    model.base_model.set_adapter(names)
    for name, parameter in model.named_parameters():
        if "magnitude" in name or name.endswith("bias"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype)


def case_model(case, dtype):
    options = {**MOE_CASES.get(case, {}), "is_moe": True} if case in MOE_CASES else CASES[case]
    return adapted(dtype, **options)


def engine_of(model):
    """verl's, that merges adapters; `model` is sharded over all ranks."""
    from verl.workers.engine import FSDPEngine

    mesh, base = init_device_mesh("cpu", (dist.get_world_size(),)), model.base_model.model
    apart = () if base.config.tie_word_embeddings else (base.model.embed_tokens, base.lm_head)
    for module in (*base.model.layers, *apart):
        fully_shard(module, mesh=mesh)
    engine = object.__new__(FSDPEngine)
    engine.module = fully_shard(model, mesh=mesh)
    engine.model_config = SimpleNamespace(lora={"merge": True}, hf_config=base.config)
    engine._uses_fsdp2_cpu_offload_policy = engine._qat_enabled = False
    engine._is_offload_param = True
    return engine


@dataclass
class Exports:
    """verl's export and ours, on a CPU; `moves`: the models that verl moved to a device or back."""

    verls: Callable
    ours: Callable
    moves: list = field(default_factory=list)


@contextmanager
def exporting():
    """Both exports, while verl does without an accelerator, of which these processes have none."""
    from verl.workers.engine.fsdp import transformer_impl

    from verl_sglang_sync.verl import exports, merged_lora

    verls = inspect.unwrap(transformer_impl.FSDPEngine.get_per_tensor_param)
    made = Exports(verls, exports._repeatable(verls))
    with ExitStack() as stack:
        for module, name, instead in (
            (transformer_impl, "get_device_id", lambda: CPU),
            (merged_lora, "get_device_id", lambda: CPU),
            (transformer_impl, "log_gpu_memory_usage", lambda *_, **__: None),
            (transformer_impl, "load_fsdp_model_to_gpu", made.moves.append),
            (transformer_impl, "offload_fsdp_model_to_cpu", made.moves.append),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        yield made


def copied(export):
    return {name: tensor.clone() for name, tensor in export}


def merged_by_peft(model):
    """With the names and in the dtypes that verl exports: buffers as they are."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    model = copy.deepcopy(model).merge_and_unload()
    buffers = dict(model.named_buffers())
    state = {n: t if n in buffers else t.bfloat16() for n, t in model.state_dict().items()}
    return dict(unfuse_moe_params(state.items(), model.config.model_type))


def is_same(first, second):
    """Bit for bit, with names, order and dtypes."""
    return list(first) == list(second) and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


def state_of(model):
    """What a merge could change in the trainer's model: objects, places, values, PEFT's records."""
    from peft.tuners.lora import LoraLayer

    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    locals_ = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors.values()]
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return (
        [(name, id(tensor), type(tensor)) for name, tensor in tensors.items()],
        [(tensor.data_ptr(), tensor.tolist()) for tensor in locals_],
        [(list(layer.merged_adapters), dict(layer._caches)) for layer in layers],
    )


def compared(case, dtype, *, with_verls=True):
    """How our exports of a model compare with what PEFT makes of it, and with verl's export."""
    with exporting() as exports:
        return _compared(exports, case, dtype, with_verls)


def _compared(exports, case, dtype, with_verls):
    model = case_model(case, getattr(torch, dtype))
    wanted = merged_by_peft(model)
    engine = engine_of(model)
    before = state_of(model)
    colocated, config = exports.ours(engine, layered_summon=False, base_sync_done=True)
    disaggregated, _ = exports.ours(engine)
    found = {
        "as PEFT": [is_same(copied(e), wanted) for e in (colocated, colocated, disaggregated)],
        "is unchanged": state_of(model) == before,
        "moves": len(exports.moves),
        "config": config,
    }
    verls = copied(exports.verls(engine)[0]) if with_verls else wanted
    found["as verl names it"] = [(n, t.dtype, t.shape) for n, t in verls.items()] == [
        (n, t.dtype, t.shape) for n, t in wanted.items()
    ]
    found["from verl's"] = max(
        float((verls[n].float() - wanted[n].float()).abs().max()) for n in wanted
    )
    return found
