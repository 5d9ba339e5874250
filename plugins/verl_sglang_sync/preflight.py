"""Check of a whole recipe before Ray starts. All combinations that cannot work are named at once.

`examine` reads nothing but the config and SGLang's version, so `doctor` calls it, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from omegaconf import DictConfig, OmegaConf
from packaging.version import InvalidVersion, Version

from verl_sglang_sync.config import (
    BACKEND_KEY,
    COMPILED_KEYS,
    DISAGGREGATED_BACKEND,
    ROLLOUT,
    SECTION,
    WeightSyncConfig,
)

logger = logging.getLogger(__name__)

MODEL = "actor_rollout_ref.model"
ENGINE = f"{ROLLOUT}.engine_kwargs.sglang"
DELTAS = "delta_sharded"
"""verl's backend that sends changes of the weights to standalone replicas."""
NEVER_SYNCED = ("NGRAM", "DFLASH")
"""Algorithms of speculative decoding with which SGLang updates only the target model."""


class RecipeError(ValueError):
    """A recipe with which the weight sync cannot run. The message lists every problem."""


def examine(config: DictConfig) -> tuple[WeightSyncConfig | None, list[str]]:
    """Check a composed recipe.

    Returns:
        The recipe's settings, or None without a preset. Then remarks that are no errors, as on
        flags without effect, or on a draft model that is not synced.

    Raises:
        RecipeError: has one line for each problem, with key, value, and what is allowed.
    """
    rollout = OmegaConf.select(config, ROLLOUT)
    if rollout is None:
        return None, []
    try:
        settings = WeightSyncConfig.from_rollout(rollout)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    if settings is None:
        return None, list(_without_preset(config, rollout))
    if problems := [problem for check in _CHECKS for problem in check(config, settings)]:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise RecipeError(f"the weight sync cannot run with this recipe:\n{lines}")
    return settings, list(_remarks(config, settings))


def check_recipe(config: DictConfig) -> WeightSyncConfig | None:
    """Check a recipe as `examine` does, log the remarks as warnings, and return the settings."""
    settings, remarks = examine(config)
    for remark in remarks:
        logger.warning("%s", remark)
    return settings


def _without_preset(config: DictConfig, rollout: DictConfig) -> Iterator[str]:
    """Refuse settings that need a preset, and yield remarks on settings that are ignored."""
    value = OmegaConf.select(config, "weight_sync")
    if value is not None:
        raise RecipeError(
            f"weight_sync={value!r}: Hydra added a plain value, because it did not find the "
            "presets of verl-sglang-sync. Run `verl-sglang-sync doctor`"
        )
    if OmegaConf.select(rollout, "checkpoint_engine.backend") == DISAGGREGATED_BACKEND:
        raise RecipeError(
            f"{BACKEND_KEY}={DISAGGREGATED_BACKEND!r} needs its preset: +weight_sync=disaggregated"
        )
    if rollout.get("multi_stage_wake_up") and rollout.get("name") == "sglang":
        yield (
            f"{ROLLOUT}.multi_stage_wake_up=True has no effect without +weight_sync=<preset>: "
            "verl's own wake-up order applies"
        )


def _remarks(config: DictConfig, settings: WeightSyncConfig) -> Iterator[str]:
    if ignored := ", ".join(_keys_without_effect(config, settings)):
        yield f"settings of {SECTION} without effect in this recipe: {ignored}"
    if OmegaConf.select(config, BACKEND_KEY) == DELTAS:
        yield (
            f"{BACKEND_KEY}={DELTAS!r}: verl's own backend updates the standalone replicas. The "
            "preset syncs and proves only the replicas on the trainer's GPUs. Use "
            f"+weight_sync=disaggregated, with {DISAGGREGATED_BACKEND!r}, for all replicas"
        )
    if settings.multi_stage_wake_up and not settings.free_cache_engine:
        yield (
            f"{ROLLOUT}.multi_stage_wake_up=True is ignored: free_cache_engine=False keeps the "
            "engine's memory resident, so there is nothing to wake in stages"
        )
    algorithm = _draft_algorithm(config)
    if algorithm and settings.draft_weights == "auto" and not settings.exports_draft:
        yield (
            f"speculative decoding ({algorithm}): no sync changes the draft model, because the "
            f"trainer does not have the draft's weights ({MODEL}.mtp.enable=False). Set "
            f"{SECTION}.draft_weights=synced to load every sync into the draft model, too"
        )


def _draft_algorithm(config: DictConfig) -> str | None:
    """Return the algorithm of speculative decoding, or None without a draft model to sync."""
    algorithm = OmegaConf.select(config, f"{ENGINE}.speculative_algorithm")
    if OmegaConf.select(config, f"{MODEL}.mtp.enable_rollout"):
        algorithm = OmegaConf.select(config, f"{MODEL}.mtp.speculative_algorithm")
    has_draft = algorithm is not None and str(algorithm).upper() not in NEVER_SYNCED
    return str(algorithm) if has_draft else None


def _check_engine(config: DictConfig, settings: WeightSyncConfig) -> Iterator[str]:
    name = OmegaConf.select(config, f"{ROLLOUT}.name")
    if name != "sglang":
        yield f"{ROLLOUT}.name={name!r}: allowed: 'sglang'"
    if OmegaConf.select(config, f"{ROLLOUT}.disaggregation.enabled"):
        yield (
            f"{ROLLOUT}.disaggregation.enabled=True: allowed: False (prefill/decode servers "
            "keep verl's own replica)"
        )
    quantization = OmegaConf.select(config, f"{ROLLOUT}.quantization")
    if quantization not in (None, "fp8"):
        yield f"{ROLLOUT}.quantization={quantization!r}: allowed: null, 'fp8'"
    loaders = OmegaConf.select(config, f"{ENGINE}.custom_weight_loader")
    if loaders is not None and not OmegaConf.is_list(loaders):
        yield f"{ENGINE}.custom_weight_loader={loaders!r}: expected a list of dotted paths"
    size = OmegaConf.select(config, f"{ROLLOUT}.data_parallel_size")
    # What follows concerns engines with data parallelism.
    if size in (None, 1):
        return
    if _serves_adapter(config):
        yield (
            f"{ROLLOUT}.data_parallel_size={size} with a LoRA served as an adapter: allowed: 1 "
            f"(SGLang loads no adapters with data parallelism), or {MODEL}.lora.merge=True"
        )
    attention = f"{ENGINE}.enable_dp_attention"
    if not OmegaConf.select(config, attention):
        yield (
            f"{ROLLOUT}.data_parallel_size={size}: allowed: 1, or {attention}=True (SGLang updates "
            "no other engine with data parallelism)"
        )


def _serves_adapter(config: DictConfig) -> bool:
    return _has_adapter(config) and not OmegaConf.select(config, f"{MODEL}.lora.merge")


def _has_adapter(config: DictConfig) -> bool:
    # The first key is FSDP's, the second one Megatron's.
    ranks = (OmegaConf.select(config, f"{MODEL}.{key}") for key in ("lora_rank", "lora.rank"))
    return any(isinstance(rank, int) and rank > 0 for rank in ranks)


def _check_deltas(config: DictConfig, settings: WeightSyncConfig) -> Iterator[str]:
    """Check settings with which verl's deltas would give wrong weights."""
    if OmegaConf.select(config, BACKEND_KEY) != DELTAS:
        return
    if _has_adapter(config):
        yield (
            f"{BACKEND_KEY}={DELTAS!r} with a LoRA: allowed: no LoRA (verl's deltas are of the "
            "base weights alone)"
        )
    quantization = OmegaConf.select(config, f"{ROLLOUT}.quantization")
    if quantization is not None:
        yield (
            f"{ROLLOUT}.quantization={quantization!r} with {BACKEND_KEY}={DELTAS!r}: allowed: null "
            "(verl does not quantise its deltas)"
        )


def _check_counts(config: DictConfig, settings: WeightSyncConfig) -> Iterator[str]:
    """Check the numbers of nodes and GPUs."""
    # A recipe's shell variable that is not set leaves a number empty.
    sections = ["trainer"]
    if OmegaConf.select(config, BACKEND_KEY) == DISAGGREGATED_BACKEND:
        sections.append(ROLLOUT)
    for section in sections:
        for key in ("nnodes", "n_gpus_per_node"):
            value, least = OmegaConf.select(config, f"{section}.{key}"), int(section == "trainer")
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if OmegaConf.select(config, section) is not None and not (is_number and value >= least):
                yield f"{section}.{key}={value!r}: expected a whole number of at least {least}"


def _check_disaggregated(config: DictConfig, settings: WeightSyncConfig) -> Iterator[str]:
    """Check settings that need the disaggregated backend, or exclude it."""
    backend = OmegaConf.select(config, BACKEND_KEY)
    trainer = OmegaConf.select(config, "trainer.v1.trainer_mode")
    if backend != DISAGGREGATED_BACKEND:
        if backend in (None, "naive") and trainer == "separate_async":
            yield (
                f"trainer.v1.trainer_mode='separate_async' with {BACKEND_KEY}={backend!r}: the "
                "rollouts of this trainer have GPUs of their own. Use +weight_sync=disaggregated"
            )
        return
    stages = OmegaConf.select(config, f"{ROLLOUT}.pipeline_model_parallel_size")
    if stages not in (None, 1):
        yield (
            f"{ROLLOUT}.pipeline_model_parallel_size={stages} with {BACKEND_KEY}="
            f"{DISAGGREGATED_BACKEND!r}: allowed: 1 (SGLang's engines join the update group by "
            "tensor-parallel rank)"
        )
    hybrid = OmegaConf.select(config, "actor_rollout_ref.hybrid_engine")
    if hybrid and trainer not in (None, "separate_async"):
        yield (
            f"trainer.v1.trainer_mode={trainer!r} with {BACKEND_KEY}={DISAGGREGATED_BACKEND!r}: "
            "allowed: 'separate_async'. If trainer and rollout share their GPUs, use "
            "+weight_sync=flattened or +weight_sync=compiled"
        )


def _check_graphs(config: DictConfig, settings: WeightSyncConfig) -> Iterator[str]:
    if not settings.release_cuda_graphs:
        return
    problems = [
        f"{key}={value} with {SECTION}.release_cuda_graphs=True: SGLang makes no graphs "
        "that can be released. Allowed: another value, or release_cuda_graphs=False"
        for key, value in _NO_GRAPHS_TO_RELEASE
        if OmegaConf.select(config, key) == value
    ]
    yield from problems
    is_chosen = any(OmegaConf.select(config, key) for key in _PREFILL_GRAPHS)
    if not (problems or is_chosen) and makes_breakable_graphs():
        yield (
            f"{_PREFILL_GRAPHS[0]}=None with {SECTION}.release_cuda_graphs=True: by default this "
            "SGLang makes breakable graphs of prefills for most models. They cannot be released, "
            "and it would not start. Allowed: 'disabled', or release_cuda_graphs=False"
        )


def makes_breakable_graphs() -> bool:
    """Return True if SGLang makes breakable CUDA graphs of prefills by default, as from 0.5.15 on.

    If no version is known, SGLang itself refuses at its start.
    """
    # Not by an import, which may fail in a driver without a GPU.
    try:
        return Version(version("sglang")).release >= (0, 5, 15)
    except (PackageNotFoundError, InvalidVersion):
        return False


_PREFILL_GRAPHS = (
    f"{ENGINE}.cuda_graph_backend_prefill",
    f"{ENGINE}.cuda_graph_config.prefill.backend",
    f"{ENGINE}.disable_prefill_cuda_graph",
)
"""Keys by which a recipe chooses the graphs of prefills."""

_NO_GRAPHS_TO_RELEASE = (
    (f"{ROLLOUT}.enforce_eager", True),
    (f"{ENGINE}.disable_cuda_graph", True),
    (f"{ENGINE}.disable_decode_cuda_graph", True),
    (f"{ENGINE}.cuda_graph_backend_decode", "disabled"),
    (f"{ENGINE}.cuda_graph_config.decode.backend", "disabled"),
    # SGLang refuses to start with these and the memory saver for graphs.
    (f"{ENGINE}.cuda_graph_backend_decode", "breakable"),
    (f"{ENGINE}.cuda_graph_config.decode.backend", "breakable"),
    (f"{ENGINE}.cuda_graph_backend_prefill", "breakable"),
    (f"{ENGINE}.cuda_graph_config.prefill.backend", "breakable"),
)


SLEEP_KEYS = ("release_cuda_graphs",)
"""Keys that apply only to engines whose weights sleep."""

SYNC_KEYS = (
    *("timeouts_s", "manifest_check", "prove_every_n_syncs", "on_fallback"),
    *("routes", "draft_weights"),
)
"""Keys that apply to every sync of ours, and not to verl's own update. Without `report_file`, which
does no harm: the file stays empty, and the log has the reason."""


def _keys_without_effect(config: DictConfig, settings: WeightSyncConfig) -> Iterator[str]:
    """Yield each key that the user has set without effect in this recipe, with the reason."""
    backend = OmegaConf.select(config, BACKEND_KEY)
    has_hybrid = OmegaConf.select(config, "actor_rollout_ref.hybrid_engine") is not False
    without_effect: list[tuple[str, Sequence[str]]] = []
    if backend not in (None, "naive") and not has_hybrid:
        # No engine shares the trainer's GPUs, so none sleeps. With another backend no sync is ours.
        sync_keys = () if backend == DISAGGREGATED_BACKEND else SYNC_KEYS
        reason = f"{BACKEND_KEY}={backend!r} with hybrid_engine=False"
        without_effect.append((reason, (*SLEEP_KEYS, *sync_keys)))
    elif not settings.free_cache_engine:
        without_effect.append(("free_cache_engine=False: nothing sleeps", SLEEP_KEYS))
    elif _serves_adapter(config):
        without_effect.append(("a LoRA adapter is served: the weights never sleep", SLEEP_KEYS))
    if not _draft_algorithm(config):
        reason = "no speculative decoding with a draft model that SGLang updates"
        without_effect.append((reason, ("draft_weights",)))
    if settings.mode != "compiled":
        without_effect.append((f"mode={settings.mode!r}", COMPILED_KEYS))
    # A key that has its default value was not set, or needs no remark.
    default = WeightSyncConfig(
        mode=settings.mode, bucket_bytes=1, multi_stage_wake_up=True, free_cache_engine=True
    )
    reasons = {key: reason for reason, keys in without_effect for key in keys}
    for key, reason in reasons.items():
        if (value := getattr(settings, key)) != getattr(default, key):
            yield f"{key}={value!r} ({reason})"


_CHECKS: tuple[Callable[[DictConfig, WeightSyncConfig], Iterator[str]], ...] = (
    _check_engine,
    _check_deltas,
    _check_counts,
    _check_disaggregated,
    _check_graphs,
)


def with_recipe_check(validate_config: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap verl's `validate_config(config, ...)` so that `check_recipe` runs first."""

    # verl has no hook between the composition of a recipe and `ray.init`. Every trainer entry point
    # calls `validate_config` there, so this is the narrowest place.
    def validate(config: DictConfig, *args: Any, **kwargs: Any) -> Any:
        check_recipe(config)
        return validate_config(config, *args, **kwargs)

    validate.__wrapped__ = validate_config  # type: ignore[attr-defined]
    return validate
