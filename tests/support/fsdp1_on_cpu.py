"""Lets verl train with FSDP1 on a CPU, in memory that engines can map.

verl imports this module in all its processes where `VERL_USE_EXTERNAL_MODULES` names it. FSDP1
refuses to broadcast the first parameters over gloo, and verl names the device to which it moves
them "cpu:cpu", where they are; all else is as on a GPU.
"""

from functools import wraps
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils

from sglang_loader.common.shared_memory import share_on_host

_init = FullyShardedDataParallel.__init__


@wraps(_init)
def _shared(self: Any, *args: Any, **kwargs: Any) -> None:
    # Not earlier: it needs verl's platform.
    from verl.workers.engine.fsdp import transformer_impl

    transformer_impl.load_fsdp_model_to_gpu = lambda _: None
    _init(self, *args, **kwargs)
    share_on_host(self._handle.flat_param.data)


FullyShardedDataParallel.__init__ = _shared  # type: ignore[method-assign]
_init_utils._check_module_states_for_sync_module_states = lambda _: None
