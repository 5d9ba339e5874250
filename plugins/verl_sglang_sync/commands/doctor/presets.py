"""Checks of a recipe, a list of arguments of `main_ppo`: Hydra's overrides and options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig, OmegaConf, flag_override

from verl_sglang_sync.commands.doctor.check import FAIL, OK, WARN, Check
from verl_sglang_sync.config import BACKEND_KEY, DISAGGREGATED_BACKEND, ROLLOUT, WeightSyncConfig
from verl_sglang_sync.stages import SYNC

USUAL = (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.multi_stage_wake_up=True")
USUAL_RECIPE = (*USUAL, "+weight_sync=compiled")


def compose(arguments: Sequence[str]) -> DictConfig:
    """Compose verl's config as `python -m verl.trainer.main_ppo` does, without importing verl."""
    from hydra import version
    from hydra._internal import utils
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.utils import setup_globals
    from hydra.types import RunMode

    parser = utils.get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    options = parser.parse_args(list(arguments))
    if options.experimental_rerun:
        raise ValueError("--experimental-rerun: allowed: the options of a run of its own")
    verl = find_spec("verl")
    if verl is None or verl.origin is None:
        raise ImportError("verl is not installed")
    # `hydra.main` does the same, but reads the arguments of the process.
    version.setbase(None)
    setup_globals()  # resolvers such as `now`
    main_ppo = str(Path(verl.origin).with_name("trainer") / "main_ppo.py")
    folder = utils.compute_search_path_dir(main_ppo, None, options.config_path or "config")
    search_path = utils.create_config_search_path(folder)
    if options.config_dir is not None:
        path = Path(options.config_dir).absolute()
        if not path.is_dir():
            raise ValueError(f"--config-dir={options.config_dir}: there is no such folder")
        search_path.prepend("command-line", f"file://{path}", SearchPathQuery(provider="schema"))
    name, loader = options.config_name or "ppo_trainer", ConfigLoaderImpl(search_path)
    config = loader.load_configuration(name, options.overrides, RunMode.RUN)
    with flag_override(config, ["struct", "readonly"], False):
        del config["hydra"]  # Hydra's own part, which main_ppo does not get
    return config


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"main_ppo refuses: {message}. Options stand before or after all overrides")


def recipe_checks(arguments: Sequence[str], num_gpus: int) -> Iterator[Check]:
    """Yield the results of the preflight for a recipe, and a description of its syncs."""
    from verl_sglang_sync.preflight import examine  # a broken installation may fail here

    try:
        config = compose(arguments or USUAL_RECIPE)
        settings, remarks = examine(config)
    except Exception as error:
        yield Check("recipe: preflight", FAIL, str(error), "no run would start")
        return
    yield Check("recipe: preflight", OK, "passes")
    for remark in remarks:
        yield Check("recipe: remark", WARN, remark)
    detail, advice = "verl's own weight sync", "to change that, choose a +weight_sync=<preset>"
    if settings is not None:
        route, sleep = _route(config, settings, num_gpus), _sleep(config, settings, num_gpus)
        detail, advice, wanted = f"{route}. {sleep}", "", config.trainer.n_gpus_per_node
        if not num_gpus:
            advice = "for development only: no GPU here"
        elif wanted > num_gpus:
            advice = f"trainer.n_gpus_per_node={wanted}, but {num_gpus} GPUs are visible here"
    yield Check("recipe: what it does", WARN if advice else OK, detail, advice)


def _route(config: DictConfig, settings: WeightSyncConfig, num_gpus: int) -> str:
    """Describe the route of later syncs, and name the reasons against pull."""
    backend, nnodes = OmegaConf.select(config, BACKEND_KEY), config.trainer.nnodes
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    is_elsewhere, strategy = backend == DISAGGREGATED_BACKEND, actor.strategy
    uses_mbridge = strategy == "megatron" and OmegaConf.select(actor, "megatron.vanilla_mbridge")
    has_lora = OmegaConf.select(model, "lora_rank") or OmegaConf.select(model, "lora.rank")
    may_exchange = "exchange" in settings.routes
    # With one of these, the engines read no bytes of the trainer's parameters.
    exported = {
        f"mode={settings.mode}": not settings.uses_plan,
        f"checkpoint_engine.backend={backend}": not is_elsewhere and backend not in (None, "naive"),
        f"actor.strategy={strategy}": strategy not in ("fsdp", "fsdp2", "megatron"),
        "megatron.vanilla_mbridge=True": uses_mbridge,
        "LoRA": has_lora,
    }
    obstacles = exported | {
        f"routes={settings.routes}": "pull" not in settings.routes,
        f"trainer.nnodes={nnodes}, routes={settings.routes}": nnodes > 1 and not may_exchange,
        "no GPU here": not num_gpus,
    }
    reasons = ", ".join(reason for reason, holds in obstacles.items() if holds)
    if not reasons:
        has_nodes = may_exchange and (is_elsewhere or nnodes > 1)
        nodes = ", and exchange shards between nodes" if has_nodes else ""
        return f"Later syncs pull the trainer's parameters{nodes}"
    if may_exchange and not any(exported.values()):
        return f"Later syncs exchange the trainer ranks' shards (no pull: {reasons})"
    return f"Every sync makes the full export (no pull: {reasons})"


def _sleep(config: DictConfig, settings: WeightSyncConfig, num_gpus: int) -> str:
    if not (num_gpus and settings.free_cache_engine and config.actor_rollout_ref.hybrid_engine):
        return "Nothing sleeps"
    order = settings.stages
    # Without stages all memory is resumed before the sync.
    at_once = (*order.before_sync, *order.after_sync, SYNC)
    wake = order.wake if settings.multi_stage_wake_up else at_once
    return f"Sleep: {', '.join(order.sleep)}. Wake-up: {', '.join(wake)}"
