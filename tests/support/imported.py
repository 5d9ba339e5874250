"""What `support.forks` imports before it forks."""

import gc
import importlib

import setproctitle

from support import transformer_engine
from support.forks import die_with_parent

gc.disable()  # an eighth of the time of the imports
transformer_engine.install()  # megatron-core looks for it when it is imported
for module in (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang_loader.sglang_plugin",
    "support.trainer",
    "torch.distributed.tensor",
    "unit.route_ranks",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.engine.megatron.transformer_impl",
    "verl_sglang_sync.routes.broadcast",
    "verl_sglang_sync.sync.sharding_manager",
    "verl_sglang_sync.engine.update_groups",
):
    importlib.import_module(module)

die_with_parent()
# SGLang collects garbage each time an engine releases memory, which takes 0.5 s with all imports.
gc.collect()
gc.freeze()
gc.enable()
# Where the process's title goes must be found before the environment changes.
setproctitle.setproctitle("tests")
