"""Checks of a recipe: the preflight, and a description of the recipe's syncs on this machine.

A recipe is a list of arguments of `main_ppo`: Hydra's overrides and options. It is the user's own,
or a usual one.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig, OmegaConf

from verl_sglang_sync.commands.doctor.check import FAIL, OK, WARN, Check
from verl_sglang_sync.config import (
    BACKEND_KEY,
    DISAGGREGATED_BACKEND,
    ROLLOUT,
    WeightSyncConfig,
)

USUAL = (
    f"{ROLLOUT}.name=sglang",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.multi_stage_wake_up=True",
    "actor_rollout_ref.actor.strategy=fsdp2",
)
USUAL_RECIPE = (*USUAL, "+weight_sync=compiled")
ON_THE_HOST = {
    "on": "all weights",
    "auto": "all weights until the plan is proven, then only what it does not rewrite",
}


@dataclass(frozen=True)
class Machine:
    """The properties of this machine on which a sync depends.

    Attributes:
        reads_other_gpus: True if processes can read memory of other GPUs.
    """

    num_gpus: int
    reads_other_gpus: bool


def compose(arguments: Sequence[str]) -> DictConfig:
    """Compose verl's config as `python -m verl.trainer.main_ppo` does, without importing verl.

    Args:
        arguments: overrides, and Hydra's options such as `--config-name`.

    Raises:
        ValueError: main_ppo would refuse the arguments, or would fail with them.
        ImportError: verl is not installed.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import compute_search_path_dir, create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra

    verl = find_spec("verl")
    if verl is None or not verl.submodule_search_locations:
        raise ImportError("verl is not installed")
    main_ppo = Path(verl.submodule_search_locations[0]) / "trainer" / "main_ppo.py"
    options = _hydra_options(arguments)
    # `hydra.main` does the same, but reads the arguments of the process.
    folder = compute_search_path_dir(str(main_ppo), None, options.config_path or "config")
    search_path = create_config_search_path(folder)
    if options.config_dir is not None:
        config_dir = Path(options.config_dir).absolute()
        if not config_dir.is_dir():
            raise ValueError(f"--config-dir={options.config_dir}: there is no folder {config_dir}")
        schema = SearchPathQuery(provider="schema")
        search_path.prepend("command-line", f"file://{config_dir}", anchor=schema)
    with initialize_config_dir(str(main_ppo.parent), version_base=None):  # undone at the end
        GlobalHydra.instance().clear()
        Hydra.create_main_hydra2("main_ppo", search_path)
        return hydra_compose(options.config_name or "ppo_trainer", options.overrides)


def _hydra_options(arguments: Sequence[str]) -> Namespace:
    """Parse main_ppo's arguments as Hydra does."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse_arguments  # type: ignore[method-assign]
    options = parser.parse_args(list(arguments))
    for name in ("multirun", "experimental_rerun"):
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')}: allowed: the options of a single run")
    return options


def _refuse_arguments(message: str) -> NoReturn:
    raise ValueError(
        f"main_ppo refuses these arguments: {message}. Options such as --config-name must stand "
        "before all overrides, or after all"
    )


def recipe_checks(overrides: Sequence[str], machine: Machine) -> Iterator[Check]:
    """Yield the results of the preflight for a recipe, and a description of its syncs."""
    from verl_sglang_sync.preflight import examine  # a broken installation may fail here

    try:
        config = compose(overrides)
        settings, remarks = examine(config)
    except Exception as error:
        yield Check("recipe: preflight", FAIL, str(error), "no run would start")
        return
    yield Check("recipe: preflight", OK, "passes")
    for remark in remarks:
        yield Check("recipe: remark", WARN, remark)
    title, wanted, advice = "recipe: what it does", config.trainer.n_gpus_per_node, ""
    if settings is None:
        detail = "verl's own weight sync: no +weight_sync=<preset> is chosen"
        yield Check(title, WARN, detail)
        return
    if not machine.num_gpus:
        advice = "for development only: no GPU here"
    elif wanted > machine.num_gpus:
        advice = f"trainer.n_gpus_per_node={wanted}, but {machine.num_gpus} GPUs are visible here"
    detail = ". ".join(sentences(config, settings, machine))
    yield Check(title, WARN if advice else OK, detail, advice)


def sentences(config: DictConfig, settings: WeightSyncConfig, machine: Machine) -> Iterator[str]:
    """Yield sentences on a step's sync and sleep: the route, the loading, and the memory."""
    bucket = f"buckets of at most {settings.bucket_bytes >> 20} MiB"
    backend = OmegaConf.select(config, BACKEND_KEY)
    if backend not in (None, "naive", DISAGGREGATED_BACKEND):
        yield (
            f"checkpoint_engine.backend={backend!r} delivers the weights, and verl's own update "
            "loads them"
        )
        return
    if backend == DISAGGREGATED_BACKEND:
        library = "NCCL" if machine.num_gpus else "gloo"
        yield f"The trainer's first rank broadcasts {bucket} to all engines over {library}"
    else:
        shared = "CUDA IPC" if machine.num_gpus else "/dev/shm"
        staging = f"{bucket} through {settings.num_staging_buffers} staging buffers"
        yield f"One request per sync opens a session per rank: {staging}, shared by {shared}"
    if settings.uses_plan:
        yield _later_route(config, settings, machine)
        num_syncs = settings.prove_every_n_syncs
        proofs = f", proven again every {num_syncs} syncs" if num_syncs else ""
        yield f"The first sync makes and checks a load plan, later syncs replay the plan{proofs}"
    else:
        yield "SGLang's own load_weights loads the buckets"
    if not settings.free_cache_engine:
        yield "Nothing sleeps: free_cache_engine=False"
    elif not machine.num_gpus:
        yield "Nothing sleeps: the CPU engine keeps its memory"
    elif config.actor_rollout_ref.hybrid_engine:
        order, staged = settings.stages, settings.multi_stage_wake_up
        host = ON_THE_HOST[settings.host_backup]
        yield f"Sleep releases {', '.join(order.sleep)}, and the host keeps {host}"
        # Without stages all memory is resumed before the sync.
        wake = order.wake if staged else (*order.before_sync, *order.after_sync, "sync")
        yield f"Wake-up: {', '.join(wake)}"


def _later_route(config: DictConfig, settings: WeightSyncConfig, machine: Machine) -> str:
    """Describe the routes of later syncs, as far as they follow from the config."""
    is_elsewhere = OmegaConf.select(config, BACKEND_KEY) == DISAGGREGATED_BACKEND
    num_ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    computed, routes = list(_computed_exports(config)), []
    out_of_reach = {
        f"routes={settings.routes}": "pull" not in settings.routes,
        f"trainer.nnodes={config.trainer.nnodes}": config.trainer.nnodes > 1,
        "CUDA IPC fails between GPUs": not machine.reads_other_gpus,
        "no GPU here": not machine.num_gpus,
    }
    reasons = computed or [reason for reason, holds in out_of_reach.items() if holds]
    if not reasons:
        nearby = ", where engines are on its node" * is_elsewhere
        routes.append(f"pull the trainer's parameters{nearby}")
    if "exchange" in settings.routes and not computed:
        if is_elsewhere:
            routes.append("have every rank send the engines its shards")
        elif num_ranks > 1:  # a single rank has nobody to exchange with
            routes.append("exchange the trainer ranks' shards")
    obstacles = f" (no pull: {', '.join(reasons)})" * bool(reasons)
    if not routes:
        return f"Every sync makes the full export{obstacles}"
    return f"Later syncs {', or else '.join(routes)}, if proven to equal the export{obstacles}"


def _computed_exports(config: DictConfig) -> Iterator[str]:
    """Yield the reasons why exported tensors would be no bytes of the trainer's parameters."""
    actor_rollout = config.actor_rollout_ref
    actor, strategy = actor_rollout.actor, actor_rollout.actor.strategy
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        yield f"actor.strategy={strategy}: neither fsdp, fsdp2 nor megatron"
    if strategy == "megatron" and OmegaConf.select(actor, "megatron.vanilla_mbridge"):
        yield "actor.megatron.vanilla_mbridge=True: exports of mbridge cannot be traced"
    for key in ("model.lora_rank", "model.lora.rank"):
        if value := OmegaConf.select(actor_rollout, key):
            yield f"{key}={value}"
