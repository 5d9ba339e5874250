"""What we use of verl 0.9.1, sglang 0.5.14 and torch: a release that changed it fails here first.

`USES` lists by module of ours every upstream symbol that it imports, hooks or calls, with the
parameters or fields that it uses. What no signature shows is in `test_upstream_behaviour`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # sglang reads it while it is imported

PLUGINS = Path(__file__).parents[2] / "plugins"

ENGINES = "verl.checkpoint_engine.base"
ROLLOUT = "verl.workers.rollout"
SGLANG_ROLLOUT = f"{ROLLOUT}.sglang_rollout.sglang_rollout"
SERVER = f"{ROLLOUT}.sglang_rollout.async_sglang_server"
REGISTRY = f"{ROLLOUT}.replica:RolloutReplicaRegistry"
FP8 = "verl.utils.sglang.sglang_fp8_utils:SGLangFP8QuantizerHelper"
MANAGERS = "sglang.srt.managers"
IO = f"{MANAGERS}.io_struct"
COMPONENTS = f"{MANAGERS}.scheduler_components"
UPDATER = f"{COMPONENTS}.weight_updater:SchedulerWeightUpdaterManager"
RECEIVER = f"{COMPONENTS}.request_receiver:SchedulerRequestReceiver"
TOKENIZER = f"{MANAGERS}.tokenizer_control_mixin:TokenizerControlMixin"
RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
EAGLE = "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2"
REGISTERED = "sglang.srt.plugins.hook_registry"
PARALLEL = "sglang.srt.distributed.parallel_state"
ARGUMENTS = "sglang.srt.server_args"

# By module of ours: "symbol", "function(what we pass or override, in upstream's order)", or
# "dataclass(the fields that we read or pass by name)".
USES: dict[str, tuple[str, ...]] = {
    "verl_sglang_sync.verl_plugin": (
        "verl.utils.config",
        "verl.utils.config:validate_config(config)",
        f"{ROLLOUT}:base",
        f"{ROLLOUT}:replica",
        f"{ROLLOUT}.base:_ROLLOUT_REGISTRY",
        f"{REGISTRY}._registry",
        f"{REGISTRY}.register(name, loader)",
    ),
    "verl_sglang_sync.doctor.installation": (
        "verl.utils.config",
        "verl.workers.config:CheckpointEngineConfig",
        f"{ROLLOUT}:base",
        f"{ROLLOUT}:replica",
        f"{ROLLOUT}.base:get_rollout_class(rollout_name, mode)",
        f"{REGISTRY}.get(name)",
    ),
    "verl_sglang_sync.config": (
        "verl.workers.config:RolloutConfig(name, free_cache_engine, engine_kwargs,"
        " checkpoint_engine, quantization, multi_stage_wake_up, custom, disaggregation)",
        "verl.workers.config:CheckpointEngineConfig(backend, update_weights_bucket_megabytes)",
    ),
    "verl_sglang_sync.bench.arms": (
        "sglang.srt.weight_sync.utils:update_weights(engine, params_batch, device_mesh_key,"
        " device_mesh)",
        f"{ROLLOUT}.sglang_rollout.http_server_engine:AsyncHttpServerAdapter",
        f"{ROLLOUT}.sglang_rollout.utils:get_named_tensor_buckets",
    ),
    "verl_sglang_sync.bench.trainers": (
        "verl.utils.model:convert_weight_keys(state_dict, model)",
        "verl.workers.engine.fsdp.utils:unfuse_moe_params",
    ),
    "verl_sglang_sync.bench.colocated": ("verl.workers.engine",),
    "verl_sglang_sync.verl.step_metrics": (
        "verl.trainer.ppo.v1.trainer_base:PPOTrainer._consume_sync_metrics(self)",
    ),
    "verl_sglang_sync.verl.rollout": (
        "verl.utils.device:get_device_id",
        "verl.utils.device:get_device_name",
        f"{SGLANG_ROLLOUT}:ServerAdapter(config, model_config, device_mesh, replica_rank)",
        f"{SGLANG_ROLLOUT}:ServerAdapter.resume(self, tags)",
        f"{SGLANG_ROLLOUT}:ServerAdapter.release(self)",
        f"{SGLANG_ROLLOUT}:ServerAdapter.update_weights(self, weights, global_steps, wire_format)",
        f"{SGLANG_ROLLOUT}:ServerAdapter._init_server_adapter(self)",
        f"{SGLANG_ROLLOUT}:_strip_lora_base_layer(name)",
        f"{SERVER}:SGLangHttpServer.set_global_steps(self, global_steps)",
        FP8,
        f"{FP8}.quant_weights_by_name(self, weights, dtype)",
    ),
    "verl_sglang_sync.verl.replica": (
        f"{ROLLOUT}.replica:RolloutMode",
        f"{SERVER}:SGLangHttpServer",
        f"{SERVER}:SGLangHttpServer.launch_server(self, master_address, master_port)",
        f"{SERVER}:SGLangHttpServer.sleep(self)",
        f"{SERVER}:SGLangHttpServer.lora_as_adapter",
        f"{SERVER}:SGLangReplica",
        f"{IO}:ReleaseMemoryOccupationReqInput(tags)",
        f"{ARGUMENTS}:ServerArgs(custom_weight_loader)",
    ),
    "verl_sglang_sync.verl.exports": (
        "verl.workers.engine.base:BaseEngine",
        "verl.workers.engine.base:BaseEngine.get_per_tensor_param(self)",
    ),
    "verl_sglang_sync.verl.checkpoint_engine": (
        f"{ENGINES}:CheckpointEngine",
        f"{ENGINES}:CheckpointEngineRegistry",
        f"{ENGINES}:CheckpointEngineRegistry.register(backend)",
    ),
    "verl_sglang_sync.verl.cpu_platform": (
        "verl.plugin.platform:PlatformBase",
        "verl.plugin.platform:PlatformRegistry",
        "verl.plugin.platform:PlatformRegistry.register(platform)",
        "verl.utils.distributed",
        "verl.utils.distributed:initialize_global_process_group_ray(timeout_second, backend)",
        "verl.utils.model",
        "verl.utils.model:load_valuehead_model"
        "(local_path, torch_dtype, model_config, trust_remote_code)",
    ),
    "verl_sglang_sync.sync.sharding_manager": (
        "verl.utils.ulysses:BaseShardingManager",
        "verl.utils.ulysses:BaseShardingManager.__enter__(self)",
        "verl.utils.ulysses:BaseShardingManager.__exit__(self, exc_type, exc_value, traceback)",
    ),
    "sglang_loader.sglang_plugin": (
        f"{REGISTERED}:HookRegistry",
        f"{REGISTERED}:HookRegistry.register(target, hook, hook_type)",
        f"{REGISTERED}:HookType",
        f"{REGISTERED}:HookType.AROUND",
    ),
    "sglang_loader.probe": (
        "sglang.srt.plugins:load_plugins",
        f"{REGISTERED}:HookRegistry",
        f"{REGISTERED}:HookRegistry._hooks",
        f"{REGISTERED}:HookRegistry._patched",
    ),
    "sglang_loader.upstream": (
        "sglang",
        f"{MANAGERS}:io_struct",
        f"{MANAGERS}.utils:is_health_check_generate_req(recv_req)",
        "sglang.srt.constants:GPU_MEMORY_ALL_TYPES",
        EAGLE,
        f"{EAGLE}.update_weights_from_tensor(self, recv_req)",
        "sglang.srt.distributed:parallel_state",
        f"{PARALLEL}:get_tensor_model_parallel_rank",
        f"{PARALLEL}:get_tensor_model_parallel_world_size",
        f"{PARALLEL}:get_moe_expert_parallel_rank",
        f"{PARALLEL}:get_moe_expert_parallel_world_size",
        f"{PARALLEL}:get_pipeline_model_parallel_rank",
        f"{PARALLEL}:get_pipeline_model_parallel_world_size",
        "sglang.srt.eplb.expert_location:get_global_expert_location_metadata",
        "sglang.srt.eplb.expert_location:ExpertLocationMetadata(logical_to_all_physical_map_cpu)",
        f"{ARGUMENTS}:get_global_server_args",
        f"{ARGUMENTS}:ServerArgs(model_path, device, speculative_algorithm, cpu_offload_gb,"
        " enable_memory_saver, enable_weights_cpu_backup, custom_weight_loader)",
    ),
    "sglang_loader.hooks.weights": (
        f"{UPDATER}(tp_worker, draft_worker, tp_cpu_group, flush_cache, is_fully_idle)",
        f"{UPDATER}._observe_weight_load(self, source)",
        f"{UPDATER}.update_weights_from_tensor(self, recv_req)",
        f"{IO}:UpdateWeightsFromTensorReqInput(serialized_named_tensors, load_format)",
        f"{IO}:UpdateWeightsFromTensorReqOutput(success, message)",
    ),
    "sglang_loader.hooks.update_groups": (
        f"{UPDATER}.update_weights_from_distributed(self, recv_req)",
        f"{RUNNER}.init_weights_update_group(self, master_address, master_port, rank_offset,"
        " world_size, group_name, backend)",
        f"{RUNNER}.destroy_weights_update_group(self, group_name)",
        f"{IO}:UpdateWeightsFromDistributedReqInput(group_name)",
        f"{IO}:UpdateWeightsFromDistributedReqOutput(success, message)",
    ),
    "sglang_loader.hooks.weight_update": (
        f"{MANAGERS}.scheduler:Scheduler.flush_cache(self, empty_cache)",
        f"{IO}:UpdateWeightsFromTensorReqInput(disable_draft_model, torch_empty_cache)",
        f"{EAGLE}.draft_worker",
    ),
    "sglang_loader.hooks.memory": (
        f"{RUNNER}.load_model(self)",
        f"{UPDATER}(is_fully_idle, offload_tags)",
        f"{UPDATER}.release_memory_occupation(self, recv_req)",
        f"{UPDATER}.resume_memory_occupation(self, recv_req)",
        f"{IO}:ReleaseMemoryOccupationReqInput(tags)",
        f"{IO}:ReleaseMemoryOccupationReqOutput",
        f"{IO}:ResumeMemoryOccupationReqInput(tags)",
        f"{IO}:ResumeMemoryOccupationReqOutput",
    ),
    "sglang_loader.hooks.http": (
        "sglang.srt.entrypoints.engine:Engine._launch_subprocesses(server_args)",
        f"{TOKENIZER}.release_memory_occupation(self, obj, request)",
        f"{TOKENIZER}.resume_memory_occupation(self, obj, request)",
        f"{TOKENIZER}.update_weights_from_tensor(self, obj, request)",
    ),
    "sglang_loader.hooks.request_gate": (
        f"{MANAGERS}.scheduler:Scheduler.init_request_receiver(self)",
        f"{RECEIVER}._pull_raw_reqs(self)",
        f"{IO}:AbortReq(abort_all, finished_reason)",
        f"{IO}:HealthCheckOutput",
        f"{IO}:TokenizedGenerateReqInput",
        f"{IO}:TokenizedEmbeddingReqInput",
        f"{IO}:BatchTokenizedGenerateReqInput(batch)",
        f"{IO}:BatchTokenizedEmbeddingReqInput(batch)",
    ),
    "sglang_loader.common.broadcast.update_group": (
        "sglang.srt.utils:init_custom_process_group"
        "(backend, timeout, world_size, rank, store, group_name)",
    ),
    "sglang_loader.host_backup.allocations": (
        "torch.cuda:memory_snapshot(mempool_id, include_traces)",
        "torch.cuda:MemPool.snapshot(include_traces)",
        "torch._C:_construct_storage_from_data_pointer",
    ),
}
PAIRS = [(use, ours) for ours, uses in USES.items() for use in uses]


def check(use: str, ours: str) -> Any:
    """The symbol; fails, naming it and our module, if it is gone or takes something else."""
    symbol, _, listed = use.removesuffix(")").partition("(")
    try:
        found = pkgutil.resolve_name(symbol)
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"{ours} needs {symbol}: {error}") from error
    if listed:
        names = listed.split(", ")
        taken = list(inspect.signature(inspect.unwrap(found)).parameters)
        if inspect.isclass(found):
            names.sort(key=lambda name: taken.index(name) if name in taken else -1)
        assert [name for name in taken if name in names] == names, (
            f"{ours} relies on {symbol}({listed}), which takes ({', '.join(taken)})"
        )
    return found


class TestSymbols:
    @pytest.mark.parametrize(("use", "ours"), PAIRS, ids=[f"{u}<-{o}" for u, o in PAIRS])
    def test_is_there_and_takes_what_we_pass(self, use: str, ours: str) -> None:
        check(use, ours)

    @pytest.mark.parametrize(
        ("use", "message"),
        [
            ("verl.gone", "ours needs verl.gone"),
            ("verl.utils.config:gone", "ours needs verl.utils.config:gone"),
            (f"{IO}:AbortReq(gone)", "ours relies on .*AbortReq.*gone.* which takes .*abort_all"),
            (f"{REGISTRY}.register(loader, name)", "ours relies on .*takes .*name, loader"),
        ],
    )
    def test_a_change_would_be_named(self, use: str, message: str) -> None:
        """Negative control."""
        with pytest.raises(AssertionError, match=message):
            check(use, "ours")

    def test_every_import_of_ours_is_listed(self) -> None:
        imports = set(upstream_imports())
        assert len(imports) > 15, "the sources were not read"
        unlisted = imports - {(use.partition("(")[0], ours) for use, ours in PAIRS}
        assert not unlisted, f"not in USES: {sorted(unlisted)}"

    def test_every_hooked_method_is_listed(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_loader import sglang_plugin

        with patch.object(HookRegistry, "register") as register:
            sglang_plugin.activate()
        assert len(register.mock_calls) > 10
        listed = {
            (use.partition("(")[0].replace(":", "."), ours) for use, ours in PAIRS if "(" in use
        }
        for target, hook, _ in (call.args for call in register.mock_calls):
            assert (target, hook.__module__) in listed, f"not in USES: {target}"

    def test_modules_of_ours_exist(self) -> None:
        for ours, uses in USES.items():
            path = PLUGINS / Path(*ours.split(".")).with_suffix(".py")
            assert path.exists(), f"{ours} is gone; nobody may need {uses}"


def upstream_imports() -> Iterator[tuple[str, str]]:
    """Every (symbol, module of ours) that an import statement of ours names."""
    for path in PLUGINS.rglob("*.py"):
        ours = ".".join(path.relative_to(PLUGINS).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}:{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            yield from ((n, ours) for n in names if n.partition(".")[0] in ("verl", "sglang"))


def test_every_request_of_our_client_has_a_route_that_takes_it() -> None:
    from sglang.srt.entrypoints.http_server import app

    client = "verl_sglang_sync.engine.server_client"
    routes = {
        (method, route.path): route.endpoint
        for route in app.routes
        for method in getattr(route, "methods", None) or ()
    }
    for call in calls_of_our_client():
        key = call.operation.method, f"/{call.operation.path}"
        assert key in routes, f"{client} sends {key}"
        if call.payload:
            request_class = inspect.get_annotations(routes[key], eval_str=True)["obj"]
            fields = {field.name for field in dataclasses.fields(request_class)}
            assert set(call.payload) <= fields, f"{client} posts {call.payload} to {key}"


def calls_of_our_client() -> list[Any]:
    """Every operation of our client, unsent."""
    from verl_sglang_sync.engine.server_client import operations as make

    group = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2}
    calls = [
        make.release_memory(["weights"]),
        make.resume_memory(["weights"]),
        make.update_weights([b""], load_format="x"),
        make.update_from_distributed(["x"], ["uint8"], [[1]], group_name="g"),
        make.init_update_group(**group, group_name="g", backend="gloo"),
        make.destroy_update_group("g"),
        make.model_info(),
    ]
    operations = [value for value in vars(make).values() if isinstance(value, make.Operation)]
    pinned = {call.operation.path for call in calls}
    assert pinned == {operation.path for operation in operations}, "an operation is not pinned"
    return calls
