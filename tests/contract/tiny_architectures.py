"""Builds real SGLang model classes, tiny, on the CPU: what a load plan must be right about.

Transformers builds and saves a random model, which gives a `config.json` and the checkpoint names
that the hub uses (it takes fused experts apart again). SGLang then builds its own class from that
folder as its model loader does. The cases are in `tiny_architecture_cases`.
"""

import inspect
import json
import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

NamedWeights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One architecture: the transformers classes and their arguments, and what SGLang needs
    besides.

    `renamed` are `(pattern, replacement)` for checkpoint names; tensors whose name matches
    `transposed` get their last two dimensions swapped; `architecture` replaces the class name in
    `config.json`; `server` are more of SGLang's `ServerArgs`.
    """

    name: str
    config: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] | None = None
    vision: dict[str, Any] | None = None
    attention_backend: str = "torch_native"
    renamed: tuple[tuple[str, str], ...] = ()
    transposed: str | None = None
    architecture: str | None = None
    server: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranks:
    """Which rank of how many this process is; `rendezvous` is a file that all ranks share."""

    rendezvous: Path
    rank: int = 0
    tp_size: int = 1
    ep_size: int = 1


class CannotBuild(Exception):
    """This class cannot be built on this machine: says which side gave up, and why."""


def prepare_process():
    """What must be set before the first import of SGLang."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    warnings.filterwarnings("ignore")


def save_checkpoint(case, folder):
    """Build `case` with transformers, save it to `folder`, return its tensors by checkpoint name.

    Raises:
        CannotBuild: transformers cannot build the class here.
    """
    import transformers

    options = dict(case.options)
    if case.text is not None:
        options |= {"text_config": case.text, "vision_config": case.vision}
    try:
        config = getattr(transformers, case.config)(**options)
        with without_hub_kernels():
            model = getattr(transformers, case.model)._from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    except Exception as error:
        raise CannotBuild(f"transformers: {_short(error)}") from error
    if case.architecture is not None:
        path = folder / "config.json"
        saved = json.loads(path.read_text())
        path.write_text(json.dumps(saved | {"architectures": [case.architecture]}))
    return read_checkpoint(case, folder)


def without_hub_kernels():
    """Mamba classes ask the hub for a GPU kernel as they are built, and do without where it has
    none; where the hub cannot be reached they would not be built at all.
    """
    from transformers.integrations import hub_kernels

    return mock.patch.object(hub_kernels, "get_kernel", side_effect=FileNotFoundError)


def read_checkpoint(case, folder):
    """The tensors that `save_checkpoint` saved, under the names and in the shapes of the hub."""
    from safetensors.torch import load_file

    saved = load_file(folder / "model.safetensors")
    return [_as_on_the_hub(case, name, tensor) for name, tensor in saved.items()]


def random_weights(like, seed):
    """New random values for the floating-point tensors of `like`; integers stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for name, tensor in like:
        if tensor.is_floating_point():
            tensor = torch.randn(tensor.shape, generator=generator).mul_(0.1).to(tensor.dtype)
        made.append((name, tensor))
    return made


def build_model(case, folder, ranks, **arguments):
    """SGLang's own model for the checkpoint in `folder`: bfloat16, on the CPU, weights not loaded.

    Args:
        case: what it is.
        folder: with `config.json`.
        ranks: of this process and the others.
        arguments: more of SGLang's `ServerArgs`.

    Raises:
        CannotBuild: SGLang cannot build the class here.
    """
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.server_args import ServerArgs

    try:
        args = ServerArgs(
            model_path=str(folder),
            device="cpu",
            attention_backend=case.attention_backend,
            sampling_backend="pytorch",
            disable_overlap_schedule=True,
            skip_tokenizer_init=True,
            tp_size=ranks.tp_size,
            ep_size=ranks.ep_size,
            **case.server,
            **arguments,
        )
        config = ModelConfig.from_server_args(args)
        _start_process_groups(args, config, ranks)
        load = LoadConfig()
        with set_default_torch_dtype(torch.bfloat16):
            model = _initialize_model(config, load, _get_quantization_config(config, load))
    except Exception as error:
        raise CannotBuild(f"sglang: {_short(error)}") from error
    finally:
        torch.set_default_dtype(torch.float32)  # SGLang's context manager leaks it on errors
    inner = getattr(model, "inner", model)  # Mistral3 wraps its module in a plain object
    assert isinstance(inner, nn.Module)
    return inner


def start_world(ranks):
    """SGLang's group of all ranks; again is no harm."""
    from sglang.srt.distributed import parallel_state

    parallel_state.init_distributed_environment(
        world_size=ranks.tp_size,
        rank=ranks.rank,
        local_rank=ranks.rank,
        distributed_init_method=f"file://{ranks.rendezvous}",
        backend="gloo",
    )


def stop_process_groups():
    """Undo what `build_model` started, for whoever uses this process next."""
    from sglang.srt.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def finish_loading(model):
    """What SGLang's loader does after the first load: quantisation methods arrange weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)


def _start_process_groups(args, config, ranks):
    from sglang.srt import server_args
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config

    sizes = {
        "tensor_model_parallel_size": ranks.tp_size,
        "expert_model_parallel_size": ranks.ep_size,
    }
    initialize = parallel_state.initialize_model_parallel
    if sizes.keys() <= inspect.signature(initialize).parameters.keys():
        server_args.set_global_server_args_for_scheduler(args)
    else:  # from 0.5.20 on it reads them from what is published
        from sglang.srt.runtime_context import SpawnRanks, publish

        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=ranks.rank))
        sizes = {}
    if not parallel_state.model_parallel_is_initialized():
        start_world(ranks)
        initialize(backend="gloo", **sizes)
    _with_as_many(initialize_moe_config, args)
    _with_as_many(initialize_dp_attention, args, config)


def _with_as_many(step, *arguments):
    """Newer releases take fewer arguments and read the rest from the process."""
    step(*arguments[: len(inspect.signature(step).parameters)])


def _as_on_the_hub(case, name, tensor):
    if case.transposed is not None and re.search(case.transposed, name):
        tensor = tensor.transpose(-2, -1).contiguous()
    for pattern, replacement in case.renamed:
        name = re.sub(pattern, replacement, name)
    return name, tensor


def _short(error):
    text = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
    return text if len(text) <= 160 else f"{text[:157]}..."
