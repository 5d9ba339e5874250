"""A preset's settings, for tests that make their own, and a recipe's."""

from typing import Any

from verl_sglang_sync.config import WeightSyncConfig

SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "trainer.v1.separate_async.num_warmup_batches=0",  # every batch is sampled after a sync
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "ray_kwargs.ray_init.num_gpus=2",
)
"""Makes `recipes/grpo_cpu_tiny.sh` train in one process and sample in another."""

_SGLANG = "actor_rollout_ref.rollout.engine_kwargs.sglang"
ENGINE_ON_A_CPU = (
    "actor_rollout_ref.rollout.enforce_eager=True",
    f"+{_SGLANG}.device=cpu",
    f"++{_SGLANG}.attention_backend=torch_native",
    f"++{_SGLANG}.sampling_backend=pytorch",
    f"+{_SGLANG}.disable_overlap_schedule=True",
    f"+{_SGLANG}.sleep_on_idle=True",
    f"+{_SGLANG}.max_total_tokens=4096",
    f"+{_SGLANG}.enable_memory_saver=False",
)
"""For a recipe that is not for a CPU."""

MEGATRON_BRIDGE = (
    "actor_rollout_ref.actor.megatron.vanilla_mbridge=False",
    *(
        f"+actor_rollout_ref.actor.megatron.override_transformer_config.{setting}"
        for setting in ("rotary_base=10000", "gradient_accumulation_fusion=False")
    ),
)
"""verl's default bridge, which does not read the model's rope_theta."""


def settings_of(mode: str = "flattened", **keys: Any) -> WeightSyncConfig:
    """The preset `mode` with other values for some keys, in a recipe that wakes up in stages."""
    recipe = {"bucket_bytes": 64 << 10, "multi_stage_wake_up": True, "free_cache_engine": True}
    return WeightSyncConfig(mode=mode, **{**recipe, **keys})  # type: ignore[arg-type]
