"""All of SGLang's internals that we use, and all differences between its releases.

The tested releases are 0.5.14, 0.5.17, 0.5.20 and 0.5.23. The code checks what a release has, not
its version number. The internals are SGLang's messages, its weight updates, and facts about an
engine's process. The hooks are registered in `sglang_plugin`.
"""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

import msgspec
import torch

from sglang_loader.common.session.messages import SESSION_FORMAT

# Messages between SGLang's processes: dataclasses in 0.5.14, msgspec structs from 0.5.15 on.


def io_struct() -> Any:
    """Return SGLang's module of the messages between its processes, and of their replies."""
    from sglang.srt.managers import io_struct

    return io_struct


def entry_bytes(entry: Any) -> bytes:
    """Return the bytes in one TP rank's entry of an update request. In 0.5.14 these are base64."""
    return base64.b64decode(entry) if isinstance(entry, str) else bytes(entry)


def with_facts(reply: Any, **facts: Any) -> Any:
    """Add facts to a reply that has no field for them, and return the reply."""
    # JSON in the field `rid`, which only generation requests use. `facts_of` reads the facts in the
    # process that serves HTTP. Facts in an update request travel the other way.
    reply.rid = json.dumps({**facts_of(reply), **facts})
    return reply


def facts_of(reply: Any) -> dict[str, Any]:
    """Return the facts that `with_facts` added to a reply. A reply of SGLang's own has none."""
    facts: dict[str, Any] = json.loads(getattr(reply, "rid", None) or "{}")
    return facts


def admin_endpoint(endpoint: Any) -> Any:
    """Guard an endpoint by the API keys that SGLang requires for weight updates."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    return auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)


def is_health_probe(request: Any) -> bool:
    """Return True for the request by which SGLang checks that its scheduler is alive."""
    from sglang.srt.managers.utils import is_health_check_generate_req

    return bool(is_health_check_generate_req(request))


WARM_UP_PREFIX = "verl-sglang-sync-warm-up-"


def is_warm_up(request: Any) -> bool:
    """Return True for a request of SGLang's own warm-up, which `mark_warm_ups` has marked."""
    return str(request.rid).startswith(WARM_UP_PREFIX)


def mark_warm_ups(http_server: Any) -> None:
    """Mark the requests of SGLang's own warm-ups by their ids. A second call does nothing.

    Args:
        http_server: SGLang's module of the HTTP server.
    """
    # The module posts the general warm-up to itself, which is its only use of `requests.post`. The
    # named warm-ups (`--warmups`) get its tokenizer manager.
    if isinstance(http_server.requests, _MarkingRequests):
        return
    http_server.requests = _MarkingRequests(http_server.requests)
    execute_warmups = http_server.execute_warmups

    async def execute_marked(mode: Any, names: Any, manager: Any) -> None:
        await execute_warmups(mode, names, _MarkingManager(manager))

    http_server.execute_warmups = execute_marked


class _Marking:
    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _MarkingRequests(_Marking):
    def post(self, url: str, *, json: Any = None, **more: Any) -> Any:
        return self._original.post(url, json={**(json or {}), "rid": _warm_up_id()}, **more)


class _MarkingManager(_Marking):
    def generate_request(self, obj: Any, *more: Any, **named: Any) -> Any:
        obj.rid = _warm_up_id()
        return self._original.generate_request(obj, *more, **named)


def _warm_up_id() -> str:
    return f"{WARM_UP_PREFIX}{uuid4().hex}"


def memory_tags() -> list[str]:
    """Return the tags under which SGLang releases and resumes memory."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return list(GPU_MEMORY_ALL_TYPES)


# Weight updates.


class SpeculationUnknown(RuntimeError):
    """A kind of speculative decoding whose models are unknown."""


def runners_of(updater: Any, *, syncs_draft: bool) -> list[Any]:
    """Return the model runners that a sync loads: drafts, then the target.

    SGLang's own update loads the same. Without `syncs_draft`, only the target is returned.

    Raises:
        SpeculationUnknown: the draft worker is of a kind whose model runners are unknown here.
    """
    target, worker = updater.tp_worker.model_runner, updater.draft_worker
    if worker is None or not syncs_draft:
        return [target]
    if hasattr(updater, "_select_runners"):  # from 0.5.21 on
        runners = [runner for _, runner in updater._select_runners("all")]
        return [*(runner for runner in runners if runner is not target), target]
    update = getattr(worker, "update_weights_from_tensor", None)
    if getattr(update, "__self__", None) is updater.tp_worker or (
        update is not None and worker.draft_worker is None
    ):
        return [target]  # DFLASH and NGRAM pass the update to the target
    if _is_eagle(worker):
        return [worker.draft_worker.draft_runner, target]
    raise SpeculationUnknown(
        f"{type(worker).__name__} loads its models in an unknown way: the draft of this kind of "
        "speculative decoding cannot be synced. Set weight_sync.draft_weights=frozen to leave the "
        "draft as it is"
    )


def _is_eagle(worker: Any) -> bool:
    """Return True for a speculative worker that updates one draft model and then the target."""
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    update = getattr(type(worker), "update_weights_from_tensor", None)
    return update is EAGLEWorkerV2.update_weights_from_tensor


class UpdateFrame:
    """SGLang's `begin_weight_update` and `end_weight_update`, which exist from 0.5.21 on.

    Layers that keep their weights packed unpack them at the beginning and pack them at the end.
    Load plans are traced, checked and replayed in between. With an older SGLang both methods do
    nothing.

    Attributes:
        is_open: the update has begun and not ended, so that weights may be in either form.
    """

    def __init__(self, updater: Any, runners: Sequence[Any]) -> None:
        updaters = [getattr(runner, "weight_updater", None) for runner in runners]
        self._updaters = [updater for updater in updaters if updater is not None]
        self._updater = updater
        self._is_callers = getattr(updater, "_session", None) is not None
        self.is_open = False

    def begin(self) -> None:
        """Begin the update. Call this before a load.

        Raises:
            RuntimeError: SGLang cannot update weights as it was launched. Nothing has changed.
        """
        for updater in self._updaters:
            _check_updatable(updater)
        for updater in self._updaters:
            if hasattr(updater, "begin_weight_update") and not self._is_callers:
                self.is_open = True
                updater.begin_weight_update()

    def end(self) -> None:
        """End the update. Call this after a load, complete or not."""
        if self._is_callers:
            session = self._updater._session
            self._updater._session = msgspec.structs.replace(session, loaded_weights=True)
        if self.is_open:
            for updater in self._updaters:
                updater.end_weight_update(run_post_load=False)  # `load_weights` has done that
            self.is_open = False


def _check_updatable(updater: Any) -> None:
    """Raise RuntimeError if SGLang's own guards, from 0.5.17 on, forbid an update."""
    # The guards are against weights that are shared with other engines, or kept in copies.
    if not hasattr(updater, "_assert_weight_cache_inactive"):
        return
    updater._assert_weight_cache_inactive("a weight sync")
    from sglang.srt.model_executor.model_runner_components import weight_updater

    guard = weight_updater._unsupported_derived_weight_cache_error
    takes_model = bool(inspect.signature(guard).parameters)
    if (reason := guard(updater.get_model()) if takes_model else guard()) is not None:
        raise RuntimeError(reason)


def record_version(updater: Any, request: Any) -> None:
    """Record the weight version for the tokens that are generated from here on."""
    if hasattr(updater, "record_weight_version_after_update"):  # from 0.5.20 on
        updater.record_weight_version_after_update(request.weight_version)


@contextmanager
def in_an_update(updater: Any, request: Any) -> Iterator[None]:
    """Run the body between SGLang's `begin_weight_update` and `end_weight_update`."""
    # From 0.5.21 on SGLang refuses its own update outside of these calls. verl 0.9.1 does not make
    # them.
    if getattr(updater, "_session", updater) is not None:  # older, or the caller has begun
        yield
        return
    io = io_struct()
    updater.begin_weight_update(io.BeginWeightUpdateReqInput(selector=request.selector))
    try:
        yield
    finally:
        updater.end_weight_update(io.EndWeightUpdateReqInput())


def is_idle(updater: Any) -> bool:
    """Return True if this rank's engine runs no request."""
    if "ignore_waiting" not in inspect.signature(updater.is_fully_idle).parameters:
        return bool(updater.is_fully_idle())
    # From 0.5.21 on, paused requests do not count.
    return bool(updater.is_fully_idle(ignore_waiting=updater.scheduler._engine_paused))


def release_problem(updater: Any) -> str | None:
    """Return the reason why SGLang's own check, from 0.5.17 on, forbids a release, or None."""
    try:
        getattr(updater, "_assert_weight_cache_inactive", str)("a release")
    except RuntimeError as error:
        return str(error)
    return None


# The process groups of broadcasts are the model runner's in 0.5.14, from 0.5.16 on its updater's.

_RUNNER = "sglang.srt.model_executor.model_runner"
_COMPONENTS = "sglang.srt.model_executor.model_runner_components"


def group_owner_class() -> str:
    """Return the full name of the class that has `init_weights_update_group`."""
    if find_spec(_COMPONENTS) is None:
        return f"{_RUNNER}.ModelRunner"
    return f"{_COMPONENTS}.weight_updater.WeightUpdater"


def update_groups(owner: Any) -> dict[str, Any]:
    """Return the process groups by name, of a model runner or of `group_owner_class`."""
    groups: dict[str, Any] = getattr(owner, "weight_updater", owner)._model_update_group
    return groups


def model_of(owner: Any) -> Any:
    return owner.model if hasattr(owner, "model") else owner.get_model()


# Facts about an engine's process.


def is_ours(server_args: Any) -> bool:
    """Return True if the server was launched with our loader (`custom_weight_loader`)."""
    return SESSION_FORMAT in (server_args.custom_weight_loader or ())


def starts_random(server_args: Any = None) -> bool:
    """Return True if a server, by default this process's, was launched with random weights."""
    arguments = launch_arguments() if server_args is None else server_args
    load_format = getattr(arguments, "load_format", None)
    return getattr(load_format, "value", load_format) == "dummy"


def engine_context(model: Any) -> dict[str, object]:
    """Return plain values on which a load plan depends and that may change in a running engine."""
    # A plan that was made with other values would be silently wrong. The expert map changes when
    # EPLB rebalances.
    from sglang.srt.distributed import parallel_state as parallel
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    experts = get_global_expert_location_metadata()
    return {
        "quantization": type(getattr(model, "quant_config", None)).__qualname__,
        "pp_size": parallel.get_pipeline_model_parallel_world_size(),
        "expert_map": None if experts is None else _places(experts.logical_to_all_physical_map_cpu),
    }


def _places(experts: torch.Tensor) -> tuple[torch.Size, bytes]:
    """Return the map from logical to physical experts that the loaders use, as shape and bytes."""
    # `experts` is int64 `[layers, logical experts, physical experts]`, each row filled up with -1.
    # Bytes are returned, because SGLang changes the map in place. The inverse map would also have
    # physical experts that nothing is loaded to.
    width = 1
    while width < experts.shape[-1] and bool((experts[..., width] >= 0).any()):
        width += 1
    kept = experts[..., :width]
    return kept.shape, kept.numpy().tobytes()


def sglang_version() -> str:
    import sglang

    return str(getattr(sglang, "__version__", ""))


def rank_facts() -> dict[str, int]:
    """Return the sizes of the groups of ranks that share a model, and this process's ranks."""
    from sglang.srt.distributed import parallel_state as parallel

    groups = (
        "tensor_model_parallel",
        "attn_tensor_model_parallel",
        "pipeline_model_parallel",
        "moe_data_parallel",
        "moe_expert_parallel",
        "moe_tensor_parallel",
    )
    functions = [f"get_{group}_{fact}" for group in groups for fact in ("rank", "world_size")]
    return {name: int(getattr(parallel, name)()) for name in functions if hasattr(parallel, name)}


_OF_ONE_LAUNCH = frozenset(
    (
        *("host", "port", "nccl_port", "dist_init_addr", "random_seed", "base_gpu_id", "node_rank"),
        *("model_path", "tokenizer_path", "served_model_name", "weight_version", "revision"),
        *("api_key", "admin_api_key", "ssl_keyfile_password", "crash_dump_folder", "download_dir"),
        *("forward_pass_metrics_worker_id", "forward_pass_metrics_ipc_name"),
        # Sizes of the KV cache and of batches, some of which SGLang derives from free memory.
        *("mem_fraction_static", "max_total_tokens", "max_running_requests"),
        *("max_queued_requests", "max_prefill_tokens", "chunked_prefill_size"),
    )
)
"""Arguments that may differ between two launches of one engine, and that no loader reads."""


def launch_facts() -> dict[str, str]:
    """Return the launch arguments of this process on which loading may depend, as text."""
    arguments = vars(launch_arguments())
    return {
        name: repr(value)
        for name, value in sorted(arguments.items())
        if name not in _OF_ONE_LAUNCH
        and not name.endswith(("_port", "_ports"))
        and not name.startswith(("log_", "_"))
        and is_plain(value)
    }


def is_plain(value: object) -> bool:
    """Return True if the `repr` of a value is the same in all processes."""
    if isinstance(value, dict):
        return all(map(is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | bytes | int | float | torch.dtype)


def tp_rank() -> int:
    from sglang.srt.distributed import parallel_state

    return int(parallel_state.get_tensor_model_parallel_rank())


def pp_rank() -> int:
    """Return this process's stage of a pipeline."""
    from sglang.srt.distributed import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank())


def device_of(model: Any) -> torch.device:
    """Return the device of a model's first parameter."""
    device: torch.device = next(model.parameters()).device
    return device


def launch_arguments() -> Any:
    """Return the arguments that the server of this process was launched with."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:  # 0.5.14
        from sglang.srt.server_args import get_global_server_args as get_server_args

    return get_server_args()


@contextmanager
def without_cpu_backup(runner: Any) -> Iterator[None]:
    """Run the body so that `ModelRunner.load_model` makes no host backup."""
    # Even if the server was launched with a host backup.
    saver = runner.memory_saver_adapter
    region = saver.region

    def region_without_backup(tag: str, enable_cpu_backup: bool) -> Any:
        return region(tag, enable_cpu_backup=False)

    saver.region = region_without_backup
    try:
        yield
    finally:
        saver.region = region


def stock_backup_reason(runner: Any, problem: str | None) -> str | None:
    """Return the reason why this launch must use SGLang's own host backup, or None.

    Args:
        problem: the reason why the memory under a tag cannot be enumerated, or None.
    """
    server_args = runner.server_args
    if not server_args.enable_memory_saver:
        return "there is no memory saver, so no weight is ever released"
    if not server_args.enable_weights_cpu_backup:
        return "the server was launched without a host backup"
    if runner.device != "cuda":
        return f"the device is {runner.device}"
    if server_args.cpu_offload_gb:
        return "cpu_offload_gb keeps weights on the host"
    return problem
