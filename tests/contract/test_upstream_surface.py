"""What we use of verl, SGLang, PEFT and torch: a release that changed it fails here first.

`USES` lists every upstream symbol that we hook or call, with the parameters or fields that we use,
and of which releases of SGLang; what is imported and not listed must be there as well. What no
signature shows is in `test_upstream_behaviour`.
"""

import inspect
import pkgutil
import re
from functools import cache
from importlib.metadata import version
from typing import get_type_hints
from unittest.mock import patch

import pytest
from packaging.version import Version

from support.our_imports import PLUGINS, imports

# A module, then what we use of it: `symbol`, `function(what we pass or override, in upstream's
# order)`, `dataclass(the fields that we read or pass by name)`; `.name` is of the class before it.
# `module [from 0.5.16]:` and `[until 0.5.15]` are for those releases of SGLang alone.
USES = """
peft.tuners.lora:
    LoraLayer
peft.tuners.lora.layer:
    Linear; .merge(self); Embedding; .merge(self); Conv1d; .merge(self)
verl.checkpoint_engine.base:
    CheckpointEngine; CheckpointEngineRegistry; .register(backend)
verl.plugin.platform:
    PlatformBase; PlatformRegistry; .register(platform)
verl.trainer.ppo.v1.trainer_base:
    PPOTrainer; ._consume_sync_metrics(self)
verl.utils.config:
    validate_config(config)
verl.utils.distributed:
    initialize_global_process_group_ray(timeout_second, backend)
verl.utils.device:
    get_device_id
verl.utils.fsdp_utils:
    normalize_peft_param_name(params)
verl.utils.kernel.fp8_kernel:
    is_triton_available()
    _DISABLE_TRITON_FP8
verl.utils.model:
    convert_weight_keys(state_dict, model)
    load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code)
verl.utils.sglang.sglang_fp8_utils:
    SGLangFP8QuantizerHelper; .quant_weights_by_name(self, weights, dtype)
verl.utils.ulysses:
    BaseShardingManager; .__enter__(self); .__exit__(self, exc_type, exc_value, traceback)
verl.workers.config:
    CheckpointEngineConfig(backend, update_weights_bucket_megabytes)
    RolloutConfig(name, free_cache_engine, multi_stage_wake_up, engine_kwargs, custom,
    checkpoint_engine, quantization, disaggregation)
verl.workers.engine:
    FSDPEngine; .get_per_tensor_param(self, layered_summon, base_sync_done)
verl.workers.engine.base:
    BaseEngine; .get_per_tensor_param(self)
verl.workers.engine.fsdp.transformer_impl:
    unfuse_moe_params(weights, model_type); offload_fsdp_model_to_cpu(model, empty_cache)
    FSDPEngine
verl.workers.rollout.base:
    _ROLLOUT_REGISTRY; get_rollout_class(rollout_name, mode)
verl.workers.rollout.llm_server:
    LLMServerClient; .generate(self, request_id, kwargs); FullyAsyncLLMServerClient
    .generate(self, request_id, kwargs); LLMServerManager; .get_client(self, client_cls, kwargs)
verl.workers.rollout.replica:
    RolloutReplicaRegistry; ._registry; .register(name, loader); .get(name); RolloutMode
    TokenOutput
verl.workers.rollout.sglang_rollout.async_sglang_server:
    SGLangReplica; .abort_all_requests(self)
    SGLangHttpServer; .launch_server(self, master_address, master_port)
    .sleep(self); .set_global_steps(self, global_steps); .abort_all_requests(self)
    .resume_generation(self); .lora_as_adapter; dataclasses; ServerArgs
verl.workers.rollout.sglang_rollout.http_server_engine:
    AsyncHttpServerAdapter; ._make_async_request(self, endpoint, payload)
verl.workers.rollout.sglang_rollout.sglang_rollout:
    ServerAdapter(config, model_config, device_mesh, replica_rank); .resume(self, tags)
    .release(self); .update_weights(self, weights, global_steps, wire_format)
    ._init_server_adapter(self); _strip_lora_base_layer(name)
verl.workers.rollout.sglang_rollout.utils:
    get_named_tensor_buckets; SGLANG_LORA_NAME; normalize_peft_config_for_sglang(peft_config)
sglang.srt.distributed.parallel_state:
    get_tensor_model_parallel_rank
    get_pipeline_model_parallel_rank; get_pipeline_model_parallel_world_size
sglang.srt.entrypoints.engine:
    Engine; ._launch_subprocesses(server_args)
sglang.srt.eplb.expert_location:
    get_global_expert_location_metadata; ExpertLocationMetadata(logical_to_all_physical_map_cpu)
sglang.srt.managers.io_struct:
    UpdateWeightsFromTensorReqInput(serialized_named_tensors, load_format, weight_version, rid,
    torch_empty_cache); UpdateWeightsFromTensorReqOutput(success, message)
    UpdateWeightsFromDistributedReqInput(group_name)
    UpdateWeightsFromDistributedReqOutput(success, message)
    ReleaseMemoryOccupationReqInput(tags); ReleaseMemoryOccupationReqOutput
    ResumeMemoryOccupationReqInput(tags); ResumeMemoryOccupationReqOutput
    AbortReq(abort_all, finished_reason); HealthCheckOutput; TokenizedGenerateReqInput
    TokenizedEmbeddingReqInput; BatchTokenizedGenerateReqInput(batch)
    BatchTokenizedEmbeddingReqInput(batch); LoadLoRAAdapterFromTensorsReqInput
sglang.srt.managers.io_struct [from 0.5.21]:
    UpdateWeightsFromTensorReqInput(selector); BeginWeightUpdateReqInput(selector)
    EndWeightUpdateReqInput
sglang.srt.managers.scheduler:
    Scheduler; .flush_cache(self, empty_cache); .init_request_receiver(self)
sglang.srt.managers.scheduler_components.request_receiver:
    SchedulerRequestReceiver; ._pull_raw_reqs(self)
sglang.srt.managers.scheduler_components.weight_updater:
    SchedulerWeightUpdaterManager(tp_worker, draft_worker, flush_cache,
    is_fully_idle, offload_tags); ._observe_weight_load(self, source)
    .update_weights_from_tensor(self, recv_req); .update_weights_from_distributed(self, recv_req)
    .update_weights_from_disk(self, recv_req)
    .release_memory_occupation(self, recv_req); .resume_memory_occupation(self, recv_req)
sglang.srt.managers.scheduler_components.weight_updater [from 0.5.17]:
    SchedulerWeightUpdaterManager; ._assert_weight_cache_inactive(self, op)
sglang.srt.managers.scheduler_components.weight_updater [from 0.5.20]:
    SchedulerWeightUpdaterManager(scheduler)
    .record_weight_version_after_update(self, weight_version)
sglang.srt.managers.scheduler_components.weight_updater [from 0.5.21]:
    SchedulerWeightUpdaterManager(_session); ._select_runners(self, selector)
    .begin_weight_update(self, recv_req); .end_weight_update(self, recv_req)
sglang.srt.managers.tokenizer_control_mixin:
    TokenizerControlMixin; .release_memory_occupation(self, obj, request)
    .resume_memory_occupation(self, obj, request); .update_weights_from_tensor(self, obj, request)
sglang.srt.managers.tokenizer_manager:
    TokenizerManager; .abort_request(self, rid, abort_all); .pause_generation(self, obj)
sglang.srt.managers.utils:
    is_health_check_generate_req(recv_req)
sglang.srt.model_executor.model_runner:
    ModelRunner; .load_model(self)
sglang.srt.model_executor.model_runner [until 0.5.15]:
    ModelRunner; .destroy_weights_update_group(self, group_name)
    .init_weights_update_group(self, master_address, master_port, rank_offset, world_size,
    group_name, backend)
sglang.srt.model_executor.model_runner [from 0.5.16]:
    load_model_with_memory_saver(model_config, memory_saver_adapter, is_draft_worker)
sglang.srt.model_executor.model_runner_components [from 0.5.16]:
    weight_updater
sglang.srt.model_executor.model_runner_components.weight_updater [from 0.5.16]:
    WeightUpdater(get_model); .destroy_weights_update_group(self, group_name)
    .init_weights_update_group(self, master_address, master_port, rank_offset, world_size,
    group_name, backend)
sglang.srt.model_executor.model_runner_components.weight_updater [from 0.5.17]:
    WeightUpdater(_model_update_group); ._assert_weight_cache_inactive(self, op)
    _unsupported_derived_weight_cache_error
sglang.srt.model_executor.model_runner_components.weight_updater [from 0.5.21]:
    WeightUpdater; .begin_weight_update(self); .end_weight_update(self, run_post_load)
sglang.srt.plugins.hook_registry:
    HookType; .AROUND; HookRegistry; .register(target, hook, hook_type); ._hooks; ._patched
sglang.srt.runtime_context [from 0.5.16]:
    get_server_args
sglang.srt.server_args:
    ServerArgs(model_path, speculative_algorithm, cpu_offload_gb,
    enable_memory_saver, enable_weights_cpu_backup, custom_weight_loader)
sglang.srt.server_args [until 0.5.15]:
    get_global_server_args
sglang.srt.speculative.eagle_worker_v2 [until 0.5.20]:
    EAGLEWorkerV2; .update_weights_from_tensor(self, recv_req); .draft_worker
sglang.srt.utils:
    init_custom_process_group(backend, timeout, world_size, rank, store, group_name)
sglang.srt.weight_sync.utils:
    update_weights(engine, params_batch, device_mesh_key, device_mesh)
torch._C:
    _construct_storage_from_data_pointer
torch.cuda:
    memory_snapshot(mempool_id, include_traces); MemPool; .snapshot(include_traces)
"""


TRACE = "_ray_trace_ctx"
"""Ray adds this parameter to the methods of whatever class an actor is made of."""

Use = tuple[str, str]
"""A module, and a symbol in it; "" for the module itself."""


def uses(release=None):
    """What we use of each, joined by ", ", with a release of SGLang; None: with any."""
    listed = {}
    for module, since, last, names in re.findall(
        r"^(\S+)(?: \[(?:from (\S+)|until (\S+))\])?:\n((?:    .*\n)*)", USES, re.MULTILINE
    ):
        if release is not None and not (
            (not since or Version(since) <= release) and (not last or release <= Version(last))
        ):
            continue
        listed.setdefault((module, ""), "")
        owner = ""
        for name, parameters in re.findall(r"([.\w]+)(?:\(([^)]*)\))?", names):
            if name.startswith("."):
                name = owner + name
            else:
                owner = name
            found = [listed.get((module, name), ""), *re.findall(r"\w+", parameters)]
            listed[module, name] = ", ".join(each for each in found if each)
    return listed


EVER, LISTED = uses(), uses(Version(version("sglang")))


def check(module, name, listed):
    """Fail, naming it and our modules, if the symbol is gone or takes something else."""
    symbol = f"{module}:{name}" if name else module
    ours = ", ".join(sorted(who_needs(name or module, listed)))
    try:
        found = pkgutil.resolve_name(symbol)
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"{symbol}, of which {ours} know: {error}") from error
    if listed:
        names = listed.split(", ")
        taken = list(inspect.signature(inspect.unwrap(found)).parameters)
        if inspect.isclass(found):
            names.sort(key=lambda name: taken.index(name) if name in taken else -1)
        assert [name for name in taken if name in names] == names, (
            f"{ours} rely on {symbol}({listed}), which takes ({', '.join(taken)})"
        )


@cache
def sources():
    folders = PLUGINS, PLUGINS.parent / "recipes"  # the recipes have the CPU platform
    paths = {
        path.relative_to(folder).with_suffix(""): path
        for folder in folders
        for path in folder.rglob("*.py")
    }
    return {".".join(name.parts): path.read_text() for name, path in paths.items()}


def who_needs(name, listed):
    """Our modules in which the symbol's own name stands, else those with one of its parameters."""
    for names in (name.rpartition(".")[2], listed.replace(", ", "|")):
        word = re.compile(rf"\b({names})\b")
        if found := [ours for ours, text in sources().items() if names and word.search(text)]:
            return found
    return []


@pytest.mark.parametrize("module", sorted({module for module, _ in LISTED}))
def test_used_upstream_names_exist_and_take_our_arguments(module):
    for (of_module, name), listed in LISTED.items():
        if of_module == module:
            assert who_needs(name or module, listed), f"{module}:{name}: nobody needs it any more"
            check(module, name, listed)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (("verl.gone", "", ""), "verl.gone"),
        (("verl.utils.config", "gone", ""), "verl.utils.config:gone"),
        (
            ("sglang.srt.managers.io_struct", "AbortReq", "gone"),
            r"hooks\.request_gate.* rely on .*AbortReq.*gone.* which takes .*abort_all",
        ),
        (
            ("sglang.srt.plugins.hook_registry", "HookRegistry.register", "hook, target"),
            r"sglang_plugin.* rely on .*takes .*target, hook",
        ),
    ],
)
def test_a_change_would_be_named(use, message):
    """Negative control."""
    with pytest.raises(AssertionError, match=message):
        check(*use)


def test_what_we_import_is_there():
    imported = {(module, name) for _, module, name in imports()}
    upstream = {use for use in imported if use[0].partition(".")[0] in ("verl", "sglang", "peft")}
    assert len(upstream) > 15, "the sources were not read"
    for module, name in upstream - (EVER.keys() - LISTED.keys()):  # those are of other releases
        check(module, name, "")


def test_every_hooked_method_is_listed_with_its_parameters():
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_loader import sglang_plugin

    with patch.object(HookRegistry, "register") as register:
        sglang_plugin.activate()
    hooked = {call.args[0] for call in register.mock_calls}
    assert len(hooked) > 10
    listed = {f"{module}.{name}" for (module, name), parameters in LISTED.items() if parameters}
    assert not hooked - listed, "not in USES"


@pytest.mark.parametrize("kind", ["HttpServer", "Replica"])
def test_our_server_and_replica_take_verls_calls(kind):
    """Ours are verl's own classes. What they override has verl's signature, or one more optional
    parameter, which another release of verl passes.
    """
    from verl.workers.rollout.sglang_rollout import async_sglang_server as verls

    from verl_sglang_sync.verl import replica as ours

    upstream, mine = getattr(verls, f"SGLang{kind}"), getattr(ours, f"WeightSync{kind}")
    assert issubclass(mine, upstream)
    methods = inspect.getmembers(upstream, inspect.isfunction)
    public = {name: method for name, method in methods if not name.startswith("_")}
    assert len(public) > 10
    for name, method in public.items():
        own = getattr(mine, name)
        taken, listed = (
            [each for each in inspect.signature(which).parameters.values() if each.name != TRACE]
            for which in (own, method)
        )
        shared, more = taken[: len(listed)], taken[len(listed) :]
        assert [each.name for each in shared] == [each.name for each in listed], name
        assert all(each.default is not inspect.Parameter.empty for each in more), name
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(method), name


def test_every_client_request_has_a_matching_endpoint():
    from sglang.srt.entrypoints.http_server import app

    from sglang_loader.hooks.proof_requests import add_endpoints

    add_endpoints(app)
    routes = {
        (method, route.path): route.endpoint
        for route in app.routes
        for method in getattr(route, "methods", None) or ()
    }
    for call in calls_of_our_client():
        key = call.operation.method, f"/{call.operation.path}"
        assert key in routes, f"our client sends {key}"
        if call.payload:
            request_class = get_type_hints(routes[key])["obj"]
            fields = inspect.signature(request_class).parameters.keys()
            assert set(call.payload) <= fields, f"our client posts {call.payload} to {key}"


def calls_of_our_client():
    """Every operation of our client, unsent."""
    from verl_sglang_sync.engine.server_client import operations as make
    from verl_sglang_sync.verl.upstream import tp_ranks_share_adapters

    group = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2}
    calls = [
        make.release_memory(["weights"]),
        make.resume_memory(["weights"]),
        make.update_weights([b""], load_format="x"),
        make.init_update_group(**group, group_name="g", backend="gloo"),
        make.destroy_update_group("g"),
        make.load_adapter("a", {}, b"", num_copies=None if tp_ranks_share_adapters() else 1),
        make.unload_adapter("a"),
        make.model_info(),
        make.ask_for_proof(),
        make.last_proof(),
    ]
    operations = [value for value in vars(make).values() if isinstance(value, make.Operation)]
    pinned = {call.operation.path for call in calls}
    assert pinned == {operation.path for operation in operations}, "an operation is not pinned"
    return calls
