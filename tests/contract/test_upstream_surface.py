"""What we use of verl 0.9.1 and sglang 0.5.14, by name: a newer one that moved it fails here first.

`NEEDS` lists every upstream symbol that our packages import or patch, with the module of ours that
needs it; a test reads our sources and refuses an import that is not listed. The classes below it
pin behaviour that no import shows.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import pickle
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # sglang reads it while it is imported

PLUGINS = Path(__file__).parents[2] / "plugins"
OURS = ("verl_sglang_sync", "sglang_loader", "hydra_plugins")

CHECKPOINT_ENGINE = "verl_sglang_sync.verl.checkpoint_engine"
CLIENT = "verl_sglang_sync.engine.server_client"
CONFIG = "verl_sglang_sync.config"
CONTEXT = "sglang_loader.upstream"
CPU = "verl_sglang_sync.verl.cpu_platform"
HOOKS = "sglang_loader.hooks.weights"
UPDATE = "sglang_loader.hooks.weight_update"
IPC = "sglang_loader.ipc"
ALLOCATIONS = "sglang_loader.host_backup.allocations"
MEMORY = "sglang_loader.hooks.memory"
HTTP = "sglang_loader.hooks.http"
GATE = "sglang_loader.hooks.requests"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver"
STAGES = "verl_sglang_sync.stages"
GRAPHS = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend"
POLICY = "sglang_loader.host_backup.policy"
MANAGER = "verl_sglang_sync.sync.sharding_manager"
PLUGIN = "verl_sglang_sync.verl_plugin"
PREFLIGHT = "verl_sglang_sync.preflight"
PROBE = "sglang_loader.probe"
REEXPORT = "verl_sglang_sync.verl.exports"
REPLICA = "verl_sglang_sync.verl.replica"
ROLLOUT = "verl_sglang_sync.verl.rollout"
SGLANG_PLUGIN = "sglang_loader.sglang_plugin"
DOCTOR = "verl_sglang_sync.doctor.installation"

VERL_ROLLOUT = "verl.workers.rollout"
ADAPTER = f"{VERL_ROLLOUT}.sglang_rollout.sglang_rollout:ServerAdapter"
STRIP = f"{VERL_ROLLOUT}.sglang_rollout.sglang_rollout:_strip_lora_base_layer"
HTTP_SERVER = f"{VERL_ROLLOUT}.sglang_rollout.async_sglang_server:SGLangHttpServer"
VERL_REPLICA = f"{VERL_ROLLOUT}.sglang_rollout.async_sglang_server:SGLangReplica"
REGISTRY = f"{VERL_ROLLOUT}.replica:RolloutReplicaRegistry"
FP8 = "verl.utils.sglang.sglang_fp8_utils:SGLangFP8QuantizerHelper"
IO = "sglang.srt.managers.io_struct"
ENGINES = "verl.checkpoint_engine.base"
GROUP = "sglang_loader.common.broadcast.update_group"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
WORKER = "sglang.srt.managers.tp_worker:BaseTpWorker"
EXPERTS = "sglang.srt.eplb.expert_location"
EAGLE = "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2"
RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin"
HOOK_REGISTRY = "sglang.srt.plugins.hook_registry:HookRegistry"


@dataclass(frozen=True)
class Need:
    """An upstream symbol.

    Attributes:
        symbol: "package.module" or "package.module:Qualified.name".
        by: the module of ours that uses it.
        parameters: what we pass or override by name or position, in upstream's order.
    """

    symbol: str
    by: str
    parameters: tuple[str, ...] = ()


NEEDS = (
    # disaggregated mode
    Need(f"{ENGINES}:CheckpointEngine", CHECKPOINT_ENGINE),
    Need(f"{ENGINES}:CheckpointEngineRegistry", CHECKPOINT_ENGINE),
    Need(f"{ENGINES}:CheckpointEngineRegistry.register", CHECKPOINT_ENGINE, ("backend",)),
    Need(
        "sglang.srt.utils:init_custom_process_group",
        GROUP,
        ("backend", "init_method", "timeout", "world_size", "rank", "store", "group_name"),
    ),
    Need(f"{UPDATER}.update_weights_from_distributed", HOOKS, ("self", "recv_req")),
    Need(EAGLE, UPDATE),
    Need(f"{EAGLE}.update_weights_from_tensor", UPDATE, ("self", "recv_req")),
    Need(f"{EAGLE}.draft_worker", UPDATE),
    Need(f"{IO}:UpdateWeightsFromDistributedReqOutput", HOOKS, ("success", "message")),
    Need(
        "sglang.srt.model_executor.model_runner:ModelRunner.init_weights_update_group",
        HOOKS,
        (
            *("self", "master_address", "master_port", "rank_offset", "world_size"),
            *("group_name", "backend"),
        ),
    ),
    Need(
        "sglang.srt.model_executor.model_runner:ModelRunner.destroy_weights_update_group",
        HOOKS,
        ("self", "group_name"),
    ),
    # verl: registries and the functions that the entry point wraps
    Need("verl.utils.config", PLUGIN),
    Need("verl.utils.config:validate_config", PLUGIN, ("config",)),
    Need(f"{VERL_ROLLOUT}:base", PLUGIN),
    Need(f"{VERL_ROLLOUT}:replica", PLUGIN),
    Need(f"{VERL_ROLLOUT}.base:_ROLLOUT_REGISTRY", PLUGIN),
    Need(f"{REGISTRY}._registry", PLUGIN),
    Need(f"{REGISTRY}.register", PLUGIN, ("name", "loader")),
    # verl: the rollout adapter
    Need(ADAPTER, ROLLOUT, ("config", "model_config", "device_mesh", "replica_rank")),
    Need(f"{ADAPTER}.resume", ROLLOUT, ("self", "tags")),
    Need(f"{ADAPTER}.release", ROLLOUT, ("self",)),
    Need(f"{ADAPTER}.update_weights", ROLLOUT, ("self", "weights", "global_steps", "wire_format")),
    Need(f"{ADAPTER}._init_server_adapter", ROLLOUT, ("self",)),
    Need(
        f"{VERL_ROLLOUT}.sglang_rollout.sglang_rollout:_strip_lora_base_layer", ROLLOUT, ("name",)
    ),
    Need("verl.utils.device:get_device_id", ROLLOUT),
    Need("verl.utils.device:get_device_name", ROLLOUT),
    Need(FP8, ROLLOUT),
    Need(f"{FP8}.quant_weights_by_name", ROLLOUT, ("self", "weights", "dtype")),
    # sglang: what a load plan depends on
    Need("sglang", CONTEXT),
    Need("sglang.srt.distributed:parallel_state", CONTEXT),
    *(
        Need(f"sglang.srt.distributed.parallel_state:get_{kind}_parallel_{what}", CONTEXT)
        for kind in ("tensor_model", "moe_expert", "pipeline_model")
        for what in ("rank", "world_size")
    ),
    Need(f"{EXPERTS}:get_global_expert_location_metadata", CONTEXT),
    Need(f"{EXPERTS}:ExpertLocationMetadata", CONTEXT),
    Need("sglang.srt.server_args:get_global_server_args", CONTEXT, ()),
    # verl: exports that can be started again
    Need("verl.workers.engine.base:BaseEngine", REEXPORT),
    Need("verl.workers.engine.base:BaseEngine.get_per_tensor_param", REEXPORT, ("self",)),
    # verl: replica and server
    Need(HTTP_SERVER, REPLICA),
    Need(f"{HTTP_SERVER}.lora_as_adapter", REPLICA),
    Need(f"{VERL_ROLLOUT}.replica:RolloutMode", REPLICA),
    Need(f"{HTTP_SERVER}.launch_server", REPLICA, ("self", "master_address", "master_port")),
    Need(f"{HTTP_SERVER}.sleep", REPLICA, ("self",)),
    Need(f"{HTTP_SERVER}.set_global_steps", ROLLOUT, ("self", "global_steps")),
    Need(VERL_REPLICA, REPLICA),
    Need("verl.utils.ulysses:BaseShardingManager", MANAGER),
    # verl: the CPU platform
    Need("verl.plugin.platform:PlatformBase", CPU),
    Need("verl.plugin.platform:PlatformRegistry", CPU),
    Need("verl.plugin.platform:PlatformRegistry.register", CPU, ("platform",)),
    Need("verl.utils.model", CPU),
    Need(
        "verl.utils.model:load_valuehead_model",
        CPU,
        ("local_path", "torch_dtype", "model_config", "trust_remote_code"),
    ),
    Need("verl.utils.distributed", CPU),
    Need(
        "verl.utils.distributed:initialize_global_process_group_ray",
        CPU,
        ("timeout_second", "backend"),
    ),
    # verl: the doctor
    Need("verl.utils.config", DOCTOR),
    Need("verl.workers.config:CheckpointEngineConfig", DOCTOR),
    Need(f"{VERL_ROLLOUT}:base", DOCTOR),
    Need(f"{VERL_ROLLOUT}:replica", DOCTOR),
    Need(f"{VERL_ROLLOUT}.base:get_rollout_class", DOCTOR, ("rollout_name", "mode")),
    Need(f"{REGISTRY}.get", DOCTOR, ("name",)),
    # sglang: the hooks
    Need("sglang.srt.plugins.hook_registry:HookRegistry", SGLANG_PLUGIN),
    Need("sglang.srt.plugins.hook_registry:HookType", SGLANG_PLUGIN),
    Need("sglang.srt.plugins.hook_registry:HookType.AROUND", SGLANG_PLUGIN),
    Need(f"{HOOK_REGISTRY}.register", SGLANG_PLUGIN, ("target", "hook", "hook_type")),
    Need("sglang.srt.plugins:load_plugins", PROBE, ()),
    Need("sglang.srt.plugins.hook_registry:HookRegistry", PROBE),
    Need(f"{HOOK_REGISTRY}._hooks", PROBE),
    Need(f"{HOOK_REGISTRY}._patched", PROBE),
    Need(f"{UPDATER}.update_weights_from_tensor", HOOKS, ("self", "recv_req")),
    Need(f"{UPDATER}.release_memory_occupation", MEMORY, ("self", "recv_req")),
    Need(f"{UPDATER}.resume_memory_occupation", MEMORY, ("self", "recv_req")),
    Need(f"{TOKENIZER}.release_memory_occupation", HTTP, ("self", "obj", "request")),
    Need(f"{TOKENIZER}.resume_memory_occupation", HTTP, ("self", "obj", "request")),
    Need(f"{IO}:ReleaseMemoryOccupationReqInput", HTTP, ("tags",)),
    # sglang: requests on their way to the scheduler
    Need("sglang.srt.managers.scheduler:Scheduler.init_request_receiver", GATE, ("self",)),
    Need(f"{RECEIVER}._pull_raw_reqs", GATE, ("self",)),
    Need(f"{TOKENIZER}.update_weights_from_tensor", GATE, ("self", "obj", "request")),
    Need(f"{TOKENIZER}.update_weights_from_distributed", GATE, ("self", "obj", "request")),
    Need("sglang.srt.managers:io_struct", GATE),
    Need(f"{IO}:AbortReq", GATE, ("abort_all", "finished_reason")),
    Need(f"{IO}:HealthCheckOutput", GATE),
    *(
        Need(f"{IO}:{name}", GATE)
        for name in (
            "TokenizedGenerateReqInput",
            "TokenizedEmbeddingReqInput",
            "BatchTokenizedGenerateReqInput",
            "BatchTokenizedEmbeddingReqInput",
        )
    ),
    Need("sglang.srt.managers.utils:is_health_check_generate_req", GATE, ("recv_req",)),
    Need(f"{RUNNER}.load_model", MEMORY, ("self",)),
    Need(f"{UPDATER}._observe_weight_load", HOOKS, ("self", "source")),
    Need(f"{WORKER}.update_weights_from_tensor", HOOKS, ("self", "recv_req")),
    Need(f"{IO}:UpdateWeightsFromTensorReqOutput", HOOKS, ("success", "message")),
    Need(f"{IO}:ReleaseMemoryOccupationReqOutput", MEMORY, ()),
    Need(f"{IO}:ResumeMemoryOccupationReqOutput", MEMORY, ()),
    Need("sglang.srt.constants:GPU_MEMORY_ALL_TYPES", MEMORY),
    # sglang: handles
    Need("sglang.srt.utils:MultiprocessingSerializer", IPC),
    Need("sglang.srt.utils:MultiprocessingSerializer.serialize", IPC, ("obj", "output_str")),
    Need("sglang.srt.utils:MultiprocessingSerializer.deserialize", IPC, ("data",)),
    Need("sglang.srt.utils.patch_torch:monkey_patch_torch_reductions", IPC),
)


def resolve(need: Need) -> Any:
    """Find the symbol, or fail naming who needs it."""
    try:
        return pkgutil.resolve_name(need.symbol)
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"{need.by} needs {need.symbol}: {error}") from error


def verify(need: Need) -> None:
    """Check that the symbol exists and still takes our parameters in our order."""
    found = resolve(need)
    if need.parameters:
        taken = list(inspect.signature(inspect.unwrap(found)).parameters)
        ours = [name for name in taken if name in need.parameters]
        assert tuple(ours) == need.parameters, (
            f"{need.by} passes {need.parameters} to {need.symbol}, which takes {tuple(taken)}"
        )


def source_of(symbol: str) -> str:
    """Source text of an upstream function or class, hooked or not."""
    return inspect.getsource(inspect.unwrap(pkgutil.resolve_name(symbol)))


def upstream_imports() -> Iterator[tuple[str, str]]:
    """Every (symbol, module of ours) that an import statement of ours names."""
    for path in sorted(PLUGINS.rglob("*.py")):
        ours = ".".join(path.relative_to(PLUGINS).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}:{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            yield from ((n, ours) for n in names if n.partition(".")[0] in ("verl", "sglang"))


class TestNames:
    @pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.symbol}<-{need.by}")
    def test_symbol_is_there(self, need: Need) -> None:
        verify(need)

    def test_every_import_of_ours_is_listed(self) -> None:
        listed = {(need.symbol, need.by) for need in NEEDS}
        imports = set(upstream_imports())
        assert len(imports) > 15, "the sources were not read"
        assert imports <= listed, f"not in NEEDS: {sorted(imports - listed)}"

    def test_listed_modules_of_ours_exist(self) -> None:
        for need in NEEDS:
            path = PLUGINS / Path(*need.by.split(".")).with_suffix(".py")
            assert path.exists(), f"{need.by} is gone; {need.symbol} may not be needed any more"

    @pytest.mark.parametrize(
        ("need", "message"),
        [
            (Need("verl.utils.config:gone", PLUGIN), f"{PLUGIN} needs verl.utils.config:gone"),
            (Need("verl.gone", CPU), f"{CPU} needs verl.gone"),
            (Need(f"{ADAPTER}.resume", ROLLOUT, ("self", "x")), f"{ROLLOUT} passes"),
        ],
    )
    def test_a_missing_symbol_would_be_named(self, need: Need, message: str) -> None:
        """Negative control."""
        with pytest.raises(AssertionError, match=message):
            verify(need)


class TestVerl:
    def test_entry_points_are_loaded_by_import(self) -> None:
        source = inspect.getsource(importlib.import_module("verl"))
        assert '"verl.plugins"' in source, f"{PLUGIN} is loaded through this group"

    def test_sglang_rollouts_are_registered_under_our_keys(self) -> None:
        base = importlib.import_module(f"{VERL_ROLLOUT}.base")
        assert ("sglang", "async") in base._ROLLOUT_REGISTRY, f"{PLUGIN} replaces this entry"
        assert "sglang" in resolve(Need(REGISTRY, PLUGIN))._registry, f"{PLUGIN} wraps this loader"

    def test_trainer_calls_the_wrapped_validation_before_ray(self) -> None:
        main = importlib.import_module("verl.trainer.main_ppo")
        config = importlib.import_module("verl.utils.config")
        assert main.validate_config is config.validate_config, f"{PLUGIN} wraps it before"
        source = inspect.getsource(main)
        after = source[source.index("def main(") :]
        assert after.index("validate_config(") < after.index("run_ppo("), f"{PREFLIGHT} runs there"

    def test_adapter_state_that_we_read(self) -> None:
        source = source_of(ADAPTER)
        for name in ("_engine", "server_actor", "replica_rank", "sleep_level", "device_mesh"):
            assert f"self.{name} = " in source or f"self.{name}: " in source, (
                f"{ROLLOUT} reads ServerAdapter.{name}"
            )
        assert '"infer_tp"' in source, f"{ROLLOUT} gathers handles over this mesh dimension"
        base = source_of(f"{VERL_ROLLOUT}.base:BaseRollout")
        for name in ("config", "model_config"):
            assert f"self.{name}" in base, f"{ROLLOUT} reads ServerAdapter.{name}"

    def test_address_of_the_server(self) -> None:
        source = source_of(
            f"{VERL_ROLLOUT}.sglang_rollout.http_server_engine:HttpServerAdapter.__init__"
        )
        assert "self.server_args" in source, f"{ROLLOUT} reads _engine.server_args.host and .port"

    def test_replica_makes_servers_from_its_class(self) -> None:
        source = source_of(VERL_REPLICA)
        for text in ("self.server_class = ray.remote(", "self.server_class.options("):
            assert text in source, f"{REPLICA} replaces SGLangReplica.server_class"

    def test_loaders_reach_the_server_arguments(self) -> None:
        config = resolve(Need("verl.workers.config:RolloutConfig", REPLICA))(name="sglang")
        config.engine_kwargs = {"sglang": {}}  # the dataclass is frozen but for some fields
        source = source_of(f"{HTTP_SERVER}.launch_server")
        for text in ('"engine_kwargs"', '"sglang"', "custom_weight_loader"):
            assert text in source, f"{REPLICA} passes its loaders through {text}"

    def test_config_keys_that_we_read(self) -> None:
        rollout = importlib.import_module("verl.workers.config").RolloutConfig
        fields = {field.name for field in dataclasses.fields(rollout)}
        for key in (
            "custom",
            "multi_stage_wake_up",
            "free_cache_engine",
            "checkpoint_engine",
            "engine_kwargs",
            "quantization",
            "disaggregation",
            "name",
        ):
            assert key in fields, f"{CONFIG} or {PREFLIGHT} reads rollout.{key}"
        engine = importlib.import_module("verl.workers.config").CheckpointEngineConfig
        names = {field.name for field in dataclasses.fields(engine)}
        for key in ("backend", "update_weights_bucket_megabytes"):
            assert key in names, f"{CONFIG} or {PREFLIGHT} reads checkpoint_engine.{key}"

    def test_worker_drives_the_stages_in_our_order(self) -> None:
        source = source_of("verl.workers.engine_workers:ActorRolloutRefWorker.update_weights")
        marks = (
            'self.rollout.resume(tags=["weights"])',
            "self.rollout.update_weights(",
            'self.rollout.resume(tags=["kv_cache"])',
        )
        positions = [source.find(mark) for mark in marks]
        assert -1 not in positions and positions == sorted(positions), (
            f"{ROLLOUT} is driven through {marks}, in this order; found at {positions}"
        )
        assert "set_expandable_segments(False)" in source[: positions[0]], (
            "verl_sglang_sync.sources.staging relies on it: expandable segments cannot be shared"
        )

    def test_sharding_manager_is_a_context_manager(self) -> None:
        base = resolve(Need("verl.utils.ulysses:BaseShardingManager", MANAGER))
        assert base().timing == {}, f"{MANAGER} publishes its seconds there"
        for method in ("__enter__", "__exit__"):
            assert method in vars(base), f"{MANAGER} overrides {method}"

    def test_cpu_platform_implements_the_whole_interface(self) -> None:
        from verl_sglang_sync.verl.cpu_platform import CpuPlatform

        missing = CpuPlatform.__abstractmethods__
        assert not missing, f"{CPU} must implement {sorted(missing)}"
        source = inspect.getsource(importlib.import_module("verl.plugin.platform.platform_manager"))
        assert '"VERL_PLATFORM"' in source, f"{CPU} is chosen with this variable"

    def test_backend_of_the_process_group_can_be_given(self) -> None:
        source = source_of("verl.utils.distributed:initialize_global_process_group_ray")
        assert "backend = backend or " in source, f"{CPU} passes the backend by name"


class TestSGLang:
    def test_plugins_are_loaded_in_every_process(self) -> None:
        scheduler = source_of("sglang.srt.managers.scheduler:run_scheduler_process")
        assert "load_plugins()" in scheduler, f"{SGLANG_PLUGIN} runs in the scheduler process"
        group = resolve(Need("sglang.srt.plugins:GENERAL_PLUGINS_GROUP", SGLANG_PLUGIN))
        assert group == "sglang.srt.plugins", f"{SGLANG_PLUGIN} is registered in this group"

    def test_hooked_class_is_where_we_look_for_it(self) -> None:
        from sglang_loader import sglang_plugin

        for hooked, ours in (
            (UPDATER, sglang_plugin._UPDATER),
            (RUNNER, sglang_plugin._RUNNER),
            (TOKENIZER, sglang_plugin._TOKENIZER),
        ):
            assert hooked.replace(":", ".") == ours, f"{SGLANG_PLUGIN} hooks it"
            resolve(Need(hooked, SGLANG_PLUGIN))

    def test_weight_updater_fields(self) -> None:
        updater = resolve(Need(UPDATER, HOOKS))
        fields = {field.name for field in dataclasses.fields(updater)}
        for name in ("tp_worker", "draft_worker", "tp_cpu_group", "offload_tags", "flush_cache"):
            assert name in fields, f"{HOOKS} reads SchedulerWeightUpdaterManager.{name}"
        assert "is_fully_idle" in fields, f"{MEMORY} asks it before a release"

    def test_load_model_takes_the_backup_setting_from_the_arguments(self) -> None:
        source = source_of(f"{RUNNER}.load_model")
        asked = source.index("self.server_args.enable_weights_cpu_backup")
        region = source.index("GPU_MEMORY_TYPE_WEIGHTS")
        assert asked < region, f"{MEMORY} switches it off around load_model"
        assert "self.model = " in source[region:], f"{MEMORY} reads ModelRunner.model"
        assert "self.is_draft_worker = " in source_of(f"{RUNNER}.__init__")
        everything = source_of("sglang.srt.model_executor.model_runner")
        assert everything.count("args.enable_weights_cpu_backup") == 1, f"{MEMORY}: read twice"

    def test_the_checkpoint_that_is_served(self) -> None:
        server_args = resolve(Need("sglang.srt.server_args:ServerArgs", CONTEXT))
        names = {field.name for field in dataclasses.fields(server_args)}
        assert "model_path" in names, f"{CONTEXT} finds the published checkpoint there"

    def test_server_arguments_that_decide_about_the_backup(self) -> None:
        server_args = resolve(Need("sglang.srt.server_args:ServerArgs", POLICY))
        fields = {field.name for field in dataclasses.fields(server_args)}
        for name in (
            "enable_memory_saver",
            "enable_weights_cpu_backup",
            "device",
            "speculative_algorithm",
            "cpu_offload_gb",
        ):
            assert name in fields, f"{POLICY} reads ServerArgs.{name}"

    def test_memory_replies_are_pickled_with_their_attributes(self) -> None:
        for name in ("ReleaseMemoryOccupationReqOutput", "ResumeMemoryOccupationReqOutput"):
            reply = resolve(Need(f"{IO}:{name}", MEMORY))()
            reply.refusal = "no"
            assert pickle.loads(pickle.dumps(reply)).refusal == "no", f"{MEMORY} replies with it"
        sender = "sglang.srt.managers.scheduler_components.output_sender:SenderWrapper"
        assert "send_pyobj(output)" in source_of(sender), f"{MEMORY} relies on pickle"
        for name in ("release_memory_occupation", "resume_memory_occupation"):
            source = source_of(f"{TOKENIZER}.{name}")
            for text in ("self.auto_create_handle_loop()", f"self.{name}_communicator(obj)"):
                assert text in source, f"{MEMORY} does the same and looks at the replies"
            route = source_of(f"sglang.srt.entrypoints.http_server:{name}")
            assert "_create_error_response(e)" in route, f"{MEMORY} raises in there"

    def test_worker_attributes(self) -> None:
        source = source_of("sglang.srt.managers.tp_worker:TpModelWorker.__init__")
        for name in ("tp_rank", "server_args"):
            assert f"self.{name} = " in source, f"{HOOKS} reads tp_worker.{name}"

    def test_stock_update_flushes_through_the_same_callable(self) -> None:
        source = source_of(f"{UPDATER}.flush_cache_after_weight_update")
        assert "empty_cache=recv_req.torch_empty_cache" in source, f"{HOOKS} flushes in this way"

    @pytest.mark.parametrize(
        ("request_class", "fields", "by"),
        [
            (
                "UpdateWeightsFromTensorReqInput",
                (
                    "serialized_named_tensors",
                    "load_format",
                    "flush_cache",
                    "disable_draft_model",
                    "torch_empty_cache",
                    "weight_version",
                ),
                f"{CLIENT} or {HOOKS}",
            ),
            ("ReleaseMemoryOccupationReqInput", ("tags",), f"{CLIENT} or {HOOKS}"),
            ("ResumeMemoryOccupationReqInput", ("tags",), f"{CLIENT} or {HOOKS}"),
        ],
    )
    def test_request_fields(self, request_class: str, fields: tuple[str, ...], by: str) -> None:
        found = resolve(Need(f"{IO}:{request_class}", by))
        assert dataclasses.is_dataclass(found), f"{HOOKS} uses dataclasses.replace on it"
        names = {field.name for field in dataclasses.fields(found)}
        for field in fields:
            assert field in names, f"{by} uses {request_class}.{field}"

    def test_memory_tags(self) -> None:
        from sglang_loader.hooks.memory import RELEASE_ORDER, RESUME_ORDER
        from verl_sglang_sync.stages import TAGS

        tags = resolve(Need("sglang.srt.constants:GPU_MEMORY_ALL_TYPES", HOOKS))
        for names in (TAGS, RELEASE_ORDER, RESUME_ORDER):
            assert set(names) == set(tags), f"{STAGES} or {MEMORY}"

    def test_requests_pass_the_gate_before_the_broadcast(self) -> None:
        receive = source_of(f"{RECEIVER}.recv_requests")
        pulled = receive.index("recv_reqs = self._pull_raw_reqs()")
        assert pulled < receive.index("self._broadcast_reqs_across_ranks(recv_reqs)"), GATE
        pull = source_of(f"{RECEIVER}._pull_raw_reqs")
        assert "if self.ps.pp_rank == 0:" in pull, f"{GATE} looks at the first stage alone"
        assert "recv_reqs = None" in pull, f"{GATE}: a rank that gets the broadcast"
        sender = source_of(
            "sglang.srt.managers.scheduler_components.output_sender:SenderWrapper.send_output"
        )
        assert "recv_obj" in sender, f"{GATE} answers with it"
        manager = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
        answer = source_of(f"{manager}._handle_abort_req")
        assert "finish_reason = recv_obj.finished_reason" in answer, f"{GATE}: the reason"
        raising = source_of(f"{manager}._handle_abort_finish_reason")
        assert "HTTPStatus.SERVICE_UNAVAILABLE" in raising, f"{GATE}: HTTP 503"
        scheduler = source_of("sglang.srt.managers.scheduler:Scheduler.abort_request")
        assert "recv_req.abort_all or req.rid.startswith(recv_req.rid)" in scheduler, GATE

    def test_the_lock_between_requests_and_updates(self) -> None:
        manager = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
        reading = "async with self.model_update_lock.reader_lock:"
        assert reading in source_of(f"{manager}.generate_request"), f"{GATE}: UpdateLock"
        for name in ("update_weights_from_tensor", "update_weights_from_distributed"):
            source = source_of(f"{TOKENIZER}.{name}")
            assert "async with self.model_update_lock.writer_lock:" in source, f"{GATE}: {name}"
            assert "return success, message" in source, f"{GATE} reads it"

    def test_the_graphs_tag(self) -> None:
        from sglang_loader.common.engine_settings import GRAPHS_VARIABLE

        backend = source_of(f"{GRAPHS}:FullCudaGraphBackend")
        assert f'get_bool_env_var("{GRAPHS_VARIABLE}")' in backend, f"{REPLICA} sets it"
        assert "tag=GPU_MEMORY_TYPE_CUDA_GRAPH" in backend, f"{MEMORY} releases it"
        assert "self._pool = self._device_module.graph_pool_handle()" in backend, MEMORY
        runner = source_of(
            "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner"
        )
        assert "self.backend = resolve_decode_backend(self)" in runner, f"{MEMORY} asks its pool"
        assert "self.decode_cuda_graph_runner = " in source_of(RUNNER), MEMORY
        parameters = inspect.signature(torch.cuda.memory_snapshot).parameters
        assert {"mempool_id", "include_traces"} <= set(parameters), ALLOCATIONS

    def test_servers_of_ours_are_known_by_an_argument(self) -> None:
        server_args = resolve(Need("sglang.srt.server_args:ServerArgs", REPLICA))
        fields = {field.name for field in dataclasses.fields(server_args)}
        assert "custom_weight_loader" in fields, f"{REPLICA} names our sessions there"

    @pytest.mark.parametrize("kind", ("tensor", "distributed"))
    def test_updates_go_through_a_communicator_and_keep_their_replies(self, kind: str) -> None:
        source = source_of(f"{TOKENIZER}.update_weights_from_{kind}")
        for text in (
            f"results = await self.update_weights_from_{kind}_communicator(obj)",
            "FanOutCommunicator.merge_results(results)",
        ):
            assert text in source, f"{GATE} stands in for the communicator"
        output = f"{IO}:UpdateWeightsFrom{kind.capitalize()}ReqOutput"
        reply = resolve(Need(output, HOOKS))(False, "busy")
        reply.closed, reply.is_busy = "why", True
        arrived = pickle.loads(pickle.dumps(reply))
        assert (arrived.closed, arrived.is_busy) == ("why", True), f"{HOOKS} replies with them"

    def test_every_request_of_our_client_has_a_route_that_takes_it(self) -> None:
        app = resolve(Need("sglang.srt.entrypoints.http_server:app", CLIENT))
        routes = {
            (method, route.path): route.endpoint
            for route in app.routes
            for method in getattr(route, "methods", None) or ()
        }
        for method, path, payload in requests_of_our_client():
            assert (method, f"/{path}") in routes, f"{CLIENT} sends {method} /{path}"
            if not payload:
                continue
            handler = routes[method, f"/{path}"]
            request_class = inspect.get_annotations(handler, eval_str=True)["obj"]
            fields = {field.name for field in dataclasses.fields(request_class)}
            assert set(payload) <= fields, f"{CLIENT} posts {sorted(payload)} to /{path}"

    def test_weight_version_is_published_with_an_update(self) -> None:
        source = source_of(
            "sglang.srt.managers.tokenizer_control_mixin:"
            "TokenizerControlMixin.update_weights_from_tensor"
        )
        assert "obj.weight_version is not None" in source, f"{CLIENT} publishes versions with it"

    def test_health_checks_can_be_kept_from_generating(self) -> None:
        from verl_sglang_sync.verl.replica import HEALTH_GENERATES

        source = source_of("sglang.srt.entrypoints.http_server:health_generate")
        asked = source.index(f"not envs.{HEALTH_GENERATES}.get()")
        assert source.index("generate_request(", asked) > asked, f"{REPLICA} sets it for routers"
        envs = resolve(Need("sglang.srt.environ:envs", REPLICA))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(HEALTH_GENERATES, "false")
            assert getattr(envs, HEALTH_GENERATES).get() is False

    def test_cpu_switches(self) -> None:
        for module, name in (
            ("sglang.srt.platforms", "SGLANG_USE_CPU_ENGINE"),
            ("sglang.srt.distributed.device_communicators.pynccl_wrapper", "SGLANG_NCCL_SO_PATH"),
        ):
            assert name in inspect.getsource(importlib.import_module(module)), f"{CPU} sets {name}"


def requests_of_our_client() -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path and payload of every operation of our client, unsent."""
    from verl_sglang_sync.engine.server_client import operations as make

    tensors: Any = (["x"], ["uint8"], [[1]])
    calls = [
        make.release_memory(["weights"]),
        make.resume_memory(["weights"]),
        make.update_weights([b""], load_format="x"),
        make.update_from_distributed(*tensors, group_name="g"),
        make.init_update_group(
            master_address="a",
            master_port=1,
            rank_offset=1,
            world_size=2,
            group_name="g",
            backend="gloo",
        ),
        make.destroy_update_group("g"),
        make.flush_cache(),
        make.pause_generation("abort"),
        make.continue_generation(),
        make.server_info(),
        make.model_info(),
        make.health(),
    ]
    operations = [value for value in vars(make).values() if isinstance(value, make.Operation)]
    assert {call.operation.path for call in calls} == {op.path for op in operations}, (
        "an operation of the client is not pinned"
    )
    return [
        (call.operation.method, call.operation.path, dict(call.payload or {})) for call in calls
    ]


class TestMemorySaver:
    def test_pools_by_tag_and_backup_setting(self) -> None:
        saver = source_of("torch_memory_saver.entrypoint:_TorchMemorySaverImpl")
        key = saver[saver.index("key = (") :]
        assert key.index("tag,") < key.index("enable_cpu_backup,"), f"{ALLOCATIONS}: key[0]"
        assert "mem_pool = self._mem_pools[key]" in saver, f"{ALLOCATIONS} lists the pools"
        from sglang_loader.host_backup.allocations import why_not_enumerable

        assert why_not_enumerable() is None

    def test_snapshot_of_one_pool(self) -> None:
        parameters = inspect.signature(torch.cuda.MemPool.snapshot).parameters
        assert "include_traces" in parameters, f"{ALLOCATIONS} leaves the traces out"
        assert callable(torch._C._construct_storage_from_data_pointer), ALLOCATIONS


class TestTorch:
    def test_marker_that_keeps_sglang_from_patching(self) -> None:
        source = source_of("sglang.srt.utils.patch_torch:monkey_patch_torch_reductions")
        assert 'hasattr(reductions, "_reduce_tensor_original")' in source, (
            f"{CPU} sets this attribute so that CPU tensors are left alone"
        )

    def test_names(self) -> None:
        for name in ("reductions:reduce_tensor", "reductions:StorageWeakRef"):
            resolve(Need(f"torch.multiprocessing.{name}", f"{CPU} or sglang_loader.load_plan"))
        strategies = torch.multiprocessing.get_all_sharing_strategies()
        assert "file_system" in strategies, f"{CPU} shares tensors in this way"
