"""A platform of verl for machines without a GPU: trainer and engine run on CPUs.

    VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=cpu_platform PYTHONPATH=recipes python -m ...

verl imports this module in every process that imports verl. The platform is slow, and meant for
the quickstart, for tests and for development.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_sglang_sync.commands.bench.cpu_tensors import share_tensors_by_name

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # verl's engine registry has no "cpu" key; the FSDP and Megatron engine classes are the same.
    "VERL_ENGINE_DEVICE": "cuda",
    # SGLang compiles the vocabulary mask at TP > 1, which takes minutes on a CPU.
    "TORCHDYNAMO_DISABLE": "1",
}
ROLLOUT_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "/nonexistent",  # at TP > 1 SGLang would load NCCL, which needs a GPU
}


ACCELERATOR_ONLY = (
    *("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"),
    *(
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
        "set_per_process_memory_fraction",
    ),
    *("empty_cache", "ipc_collect"),
    *("set_device", "manual_seed", "manual_seed_all"),
)
"""Functions that verl calls on its device module. Each does nothing here, and returns 0."""


def _nothing(*_args: Any, **_kwargs: Any) -> int:
    return 0


def _get_device_name(*_: Any) -> str:
    return "CPU"


def _mem_get_info(*_: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _get_device_properties(*_: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(name="CPU", total_memory=psutil.virtual_memory().total)


def _get_rng_state(*_: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any) -> None:
    torch.set_rng_state(state)


def _no_memory_history(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError("only a GPU's allocator has a memory history")  # verl logs the error


HISTORY = ("_record_memory_history", "_snapshot", "_dump_snapshot")


class CpuPlatform(PlatformBase):
    """verl's platform interface on a CPU. One process stands for one "GPU" of Ray's."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = types.SimpleNamespace(
        **vars(torch.cpu)
        | dict.fromkeys(ACCELERATOR_ONLY, _nothing)
        | {
            "get_device_name": _get_device_name,
            "get_device_properties": _get_device_properties,
            "mem_get_info": _mem_get_info,
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
            "memory": types.SimpleNamespace(**dict.fromkeys(HISTORY, _no_memory_history)),
        }
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl does `tensor.to(current_device())`

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # logical: `ray.init(num_gpus=N)` needs no hardware

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return dict(ROLLOUT_ENVIRONMENT)


def install() -> None:
    """Register the platform, and set up verl, torch and SGLang for the CPU in this process."""
    # Ray's workers inherit the variables. A value that the user has set stays.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    _use_plain_gloo()
    load_critics_without_flash_attention()
    share_tensors_by_name()


def _use_plain_gloo() -> None:
    """Make verl name the backend "cpu:gloo" once."""
    # verl composes "cpu:gloo,cpu:gloo", which torch refuses.
    import verl.utils.distributed as distributed

    original: Callable[..., Any] = distributed.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second, backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize


def load_critics_without_flash_attention() -> None:
    """Make verl load critics with sdpa, which computes the same as flash_attention_2."""
    # verl names flash_attention_2, a GPU kernel, for every critic.
    import verl.utils.model

    def load_valuehead_model(
        local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
    ) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    verl.utils.model.load_valuehead_model = load_valuehead_model


if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    install()
