"""A trainer rank's actor: verl's own `MegatronEngine`, with gloo on a CPU.

actor = MegatronActor(model, Layout(tp=2, pp=2))
actor.train(0.5)                 # stands for a training step
for name, tensor in actor.export(): ...
actor.offload()                  # what verl does after a sync with `param_offload`
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from sglang_loader.common.shared_memory import share_on_host
from support import transformer_engine
from support.megatron_cpu import (
    INITIALIZED_ON_CPU,
    PARAMETERS_ALONE,
    stand_in_for_cuda,
)

ENVIRONMENT = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "cpu_platform"}
"""Of a trainer rank's process, before it imports verl."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel sizes of the trainer, and how it exports.

    Attributes:
        tp: tensor parallel; likewise `pp`, `ep`, and `etp` of the experts.
        vpp: pieces of each pipeline stage.
        mbridge: the bridge that verl has deprecated, not its default.
        offload: the parameters live on the host between syncs.
        ddp: False: verl's engine of a reference policy, which has no gradient buffers.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    mbridge: bool = False
    offload: bool = True
    ddp: bool = True


class MegatronActor:
    """verl's engine of this rank, DDP-wrapped as it trains; weights loaded by its bridge.

    Args:
        model: Hugging Face checkpoint.
        layout: of the world; what it leaves over is data parallel.
        random: the weights are random numbers instead, which takes seconds.
    """

    def __init__(self, model: Path, layout: Layout, *, random: bool = False) -> None:
        on_cpu = not torch.cuda.is_available()
        transformer_engine.install()
        if on_cpu:
            stand_in_for_cuda()
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
        from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

        from verl_sglang_sync.verl.exports import make_exports_repeatable

        make_exports_repeatable()  # as the rollout does in this process
        self._layout, self._others = layout, set(_world.pg_map)
        self._engine = MegatronEngineWithLMHead(
            HFModelConfig(path=str(model), load_tokenizer=False),
            McoreEngineConfig(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                vanilla_mbridge=layout.mbridge,
                param_offload=layout.offload,
                forward_only=not layout.ddp,
                override_transformer_config=PARAMETERS_ALONE
                | (INITIALIZED_ON_CPU if layout.mbridge else {}),
                override_ddp_config={"grad_reduce_in_fp32": False},  # nothing trains: half as large
            ),
            McoreOptimizerConfig(lr=1e-6),
            CheckpointConfig(),
        )
        # `initialize` up to the optimizer, which allocates on "cuda" by that name.
        self._engine._build_tf_config()
        if random:
            load = "load_weights" if layout.mbridge else "load_hf_weights"
            setattr(self._engine.bridge, load, lambda *_, **__: None)
        self._engine.module = self._engine._build_megatron_module()
        if random:
            for tensor in self._tensors():
                tensor.detach().normal_(std=0.02)
        if on_cpu and not layout.offload:  # what an engine can read where it is
            for tensor in self._tensors():
                share_on_host(tensor)

    def close(self) -> None:
        """Dissolve Megatron's groups, and forget its choice of attention, so that another layout
        can be built.

        Megatron forgets most groups without ending them: the threads of a few hundred, which gloo
        wakes every 10 ms, would keep two cores busy.
        """
        from megatron.core import parallel_state

        dist.barrier()  # nobody is in a collective of the groups any more
        parallel_state.destroy_model_parallel()
        for group in set(_world.pg_map) - self._others:
            dist.destroy_process_group(group)
        for kernels in ("FLASH", "FUSED", "UNFUSED"):
            os.environ.pop(f"NVTE_{kernels}_ATTN", None)

    @torch.no_grad()
    def train(self, factor: float) -> None:
        """Multiply all weights: a power of two is exact."""
        from verl.utils.megatron_utils import load_megatron_model_to_gpu

        load_megatron_model_to_gpu(self._engine.module, load_grad=False)
        for tensor in self._tensors():
            tensor.mul_(factor)

    def export(self) -> Iterable[tuple[str, torch.Tensor]]:
        weights, _ = self._engine.get_per_tensor_param()
        exported: Iterable[tuple[str, torch.Tensor]] = weights
        return exported

    def offload(self) -> int | None:
        """Move the parameters to the host as verl does, where the layout says so; return the bytes
        left where they were.
        """
        if not self._layout.offload:
            return None
        from verl.utils.megatron_utils import offload_megatron_model_to_cpu

        offload_megatron_model_to_cpu(self._engine.module)
        return sum(storage.nbytes() for storage in self._storages())

    @property
    def num_storages(self) -> int:
        """In how many pieces of memory this rank's parameters lie."""
        return len({storage.data_ptr() for storage in self._storages()})

    def _storages(self) -> list[torch.UntypedStorage]:
        parameters = [p for chunk in self._engine.module for p in chunk.parameters()]
        return [parameter.untyped_storage() for parameter in parameters]

    def _tensors(self) -> list[torch.Tensor]:
        """The parameters, and buffers such as the routers' biases."""
        models = [chunk.module for chunk in self._engine.module]  # a DDP's `buffers` are others
        return [t for model in models for t in (*model.parameters(), *model.buffers())]
