"""What we take from SGLang's internals (0.5.14): its messages, and facts about an engine's process.

The hooks themselves are registered in `sglang_plugin`. What a load plan depends on, besides names
and shapes, is `engine_context`.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_loader.common.session.messages import SESSION_FORMAT


def io_struct() -> Any:
    """SGLang's messages between its processes, and the replies to them."""
    from sglang.srt.managers import io_struct

    return io_struct


def is_health_probe(request: Any) -> bool:
    """True for the request by which SGLang asks its scheduler for a sign of life."""
    from sglang.srt.managers.utils import is_health_check_generate_req

    return bool(is_health_check_generate_req(request))


def memory_tags() -> list[str]:
    """The tags under which SGLang releases and resumes memory."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return list(GPU_MEMORY_ALL_TYPES)


def is_eagle(worker: Any) -> bool:
    """True for a speculative worker that updates one draft model and then the target."""
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    update = getattr(type(worker), "update_weights_from_tensor", None)
    return update is EAGLEWorkerV2.update_weights_from_tensor


def is_ours(server_args: Any) -> bool:
    """True where the server was launched with our loader (`ServerArgs.custom_weight_loader`)."""
    return SESSION_FORMAT in (server_args.custom_weight_loader or ())


def synchronize(device: torch.device) -> None:
    """Wait until the current stream of `device` has run everything; nothing to do on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def engine_context(model: Any) -> dict[str, object]:
    """Facts of this engine process that decide where `load_weights` puts a byte.

    The expert map changes when EPLB rebalances; a plan made before that would be silently wrong.
    """
    import sglang
    from sglang.srt.distributed import parallel_state as parallel
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    experts = get_global_expert_location_metadata()
    return {
        "sglang": sglang.__version__,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "quantization": type(getattr(model, "quant_config", None)).__qualname__,
        "device": str(device_of(model)),
        "tp_rank": parallel.get_tensor_model_parallel_rank(),
        "tp_size": parallel.get_tensor_model_parallel_world_size(),
        "ep_rank": parallel.get_moe_expert_parallel_rank(),
        "ep_size": parallel.get_moe_expert_parallel_world_size(),
        "pp_rank": parallel.get_pipeline_model_parallel_rank(),
        "pp_size": parallel.get_pipeline_model_parallel_world_size(),
        "expert_map": None if experts is None else _places(experts.logical_to_all_physical_map_cpu),
    }


def _places(experts: torch.Tensor) -> torch.Tensor:
    """Where each expert of the checkpoint goes, which is what the loaders look up.

    Not the inverse: that lists physical experts which no checkpoint's expert is loaded into, since
    SGLang may keep only the nearest.

    Args:
        experts: int64 `[layers, logical experts, physical experts]`, each row filled up with -1.
    """
    width = 1
    while width < experts.shape[-1] and bool((experts[..., width] >= 0).any()):
        width += 1
    return experts[..., :width]


def tp_rank() -> int:
    """This process's tensor-parallel rank."""
    from sglang.srt.distributed import parallel_state as parallel

    rank: int = parallel.get_tensor_model_parallel_rank()
    return rank


def device_of(model: Any) -> torch.device:
    """The device of a model's first parameter."""
    device: torch.device = next(model.parameters()).device
    return device


def checkpoint_folder() -> str:
    """The folder, or the name on the hub, of the checkpoint that this process serves."""
    from sglang.srt.server_args import get_global_server_args

    path: str = get_global_server_args().model_path
    return path


def why_stock_backup(server_args: Any, problem: str | None) -> str | None:
    """Why this launch keeps SGLang's own behaviour whatever was requested; None if it need not.

    Args:
        server_args: SGLang's `ServerArgs`.
        problem: why the memory under a tag cannot be enumerated, or None.
    """
    if not server_args.enable_memory_saver:
        return "there is no memory saver, so no weight is ever released"
    if not server_args.enable_weights_cpu_backup:
        return "the server was launched without a host backup"
    if server_args.device != "cuda":
        return f"the device is {server_args.device}"
    if server_args.speculative_algorithm:
        return "the weights of a draft model are released too"
    if server_args.cpu_offload_gb:
        return "cpu_offload_gb keeps weights on the host"
    return problem
