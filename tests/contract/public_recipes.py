"""Which settings that matter to the weight sync occur together in verl's public recipes.

Taken from the 193 launch scripts that choose a rollout in verl's repository (commit 1dda039) and in
its collection of recipes (commit 48ea0a7): each row is one combination, in words of our own. Counts
of nodes, ranks and shards stand for "one" or "more than one". Most of these recipes run vLLM. Here
they run SGLang.
"""

WORDS = {
    "ascend": "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=ascend",
    "bridge": "actor_rollout_ref.actor.megatron.use_mbridge=True",
    "colocate_async": "trainer.v1.trainer_mode=colocate_async",
    "dp1": "actor_rollout_ref.rollout.data_parallel_size=1",
    "dp8": "actor_rollout_ref.rollout.data_parallel_size=8",
    "eager": "actor_rollout_ref.rollout.enforce_eager=True",
    "ep1": "actor_rollout_ref.rollout.expert_parallel_size=1",
    "ep8": "actor_rollout_ref.rollout.expert_parallel_size=8",
    "flexfetch": "actor_rollout_ref.rollout.checkpoint_engine.backend=flexfetch",
    "fp8": "actor_rollout_ref.rollout.quantization=fp8",
    "fsdp": "actor_rollout_ref.actor.strategy=fsdp",
    "fsdp2": "actor_rollout_ref.actor.strategy=fsdp2",
    "fsdp_8": "actor_rollout_ref.actor.fsdp_config.fsdp_size=8",
    "fsdp_all": "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",
    "fsdp_turbo": "actor_rollout_ref.actor.strategy=fsdp_turbo",
    "graphs": "actor_rollout_ref.rollout.enforce_eager=False",
    "hybrid": "actor_rollout_ref.hybrid_engine=True",
    "load_auto": "actor_rollout_ref.rollout.load_format=auto",
    "load_dummy": "actor_rollout_ref.rollout.load_format=dummy",
    "load_dummy_megatron": "actor_rollout_ref.rollout.load_format=dummy_megatron",
    "load_safetensors": "actor_rollout_ref.rollout.load_format=safetensors",
    "lora0": "actor_rollout_ref.model.lora_rank=0",
    "lora32": "actor_rollout_ref.model.lora_rank=32",
    "megatron": "model_engine=megatron",
    "megatron_bridge": "actor_rollout_ref.actor.megatron.vanilla_mbridge=False",
    "megatron_lora0": "actor_rollout_ref.model.lora.rank=0",
    "megatron_lora32": "actor_rollout_ref.model.lora.rank=32",
    "megatron_no_offload": "actor_rollout_ref.actor.megatron.param_offload=False",
    "megatron_offload": "actor_rollout_ref.actor.megatron.param_offload=True",
    "merged": "actor_rollout_ref.model.lora.merge=True",
    "mtp": "actor_rollout_ref.model.mtp.enable=True",
    "mtp_eagle": "actor_rollout_ref.model.mtp.speculative_algorithm=EAGLE",
    "mtp_rollout": "actor_rollout_ref.model.mtp.enable_rollout=True",
    "nccl": "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
    "no_dp_attention": "actor_rollout_ref.rollout.engine_kwargs.sglang.enable_dp_attention=False",
    "no_hybrid": "actor_rollout_ref.hybrid_engine=False",
    "no_offload": "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "no_policy": "actor_rollout_ref.actor.fsdp_config.offload_policy=False",
    "nodes1": "trainer.nnodes=1",
    "nodes2": "trainer.nnodes=2",
    "not_merged": "actor_rollout_ref.model.lora.merge=False",
    "offload": "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "one_stage": "actor_rollout_ref.rollout.multi_stage_wake_up=False",
    "policy": "actor_rollout_ref.actor.fsdp_config.offload_policy=True",
    "separate_async": "trainer.v1.trainer_mode=separate_async",
    "sleeps": "actor_rollout_ref.rollout.free_cache_engine=True",
    "staged": "actor_rollout_ref.rollout.multi_stage_wake_up=True",
    "stays": "actor_rollout_ref.rollout.free_cache_engine=False",
    "strategy_megatron": "actor_rollout_ref.actor.strategy=megatron",
    "torchtitan": "model_engine=torchtitan",
    "triton": "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=triton",
    "unquantised": "actor_rollout_ref.rollout.quantization=null",
    "veomni": "model_engine=veomni",
}
"""The setting that each word stands for."""

COMBINATIONS = """
dp1 ep1 eager fsdp2 offload fsdp_all nodes1
dp1 ep1 graphs no_dp_attention ascend megatron_offload bridge nodes1
dp1 ep1 graphs sleeps fsdp offload fsdp_all nodes2
dp1 ep1 graphs sleeps veomni nodes2
dp1 ep1 veomni nodes2
dp1 ep8 veomni nodes2
dp8 ep8 eager sleeps megatron_offload bridge nodes2
dp8 ep8 graphs sleeps veomni nodes1
dp8 ep8 megatron megatron_offload megatron_bridge bridge nodes2
dp8 ep8 megatron megatron_offload nodes2
eager fsdp2 no_offload fsdp_all nodes1
eager fsdp2 offload fsdp_all nodes1
eager load_auto fsdp2 offload fsdp_all nodes2
eager load_safetensors megatron_offload nodes1
eager megatron megatron_offload bridge nodes2
eager megatron_offload megatron_bridge bridge nodes2
eager offload nodes1
eager sleeps ascend no_offload nodes1
eager sleeps megatron_lora32 megatron megatron_offload megatron_bridge bridge nodes1
eager sleeps megatron_offload nodes1
eager sleeps offload nodes1
eager sleeps torchtitan nodes1
eager sleeps veomni nodes1
ep8 graphs fsdp2 no_offload fsdp_8 nodes1
ep8 graphs megatron megatron_offload megatron_bridge bridge nodes2
ep8 graphs sleeps megatron megatron_offload nodes2
flexfetch no_offload
fp8 ep1 graphs megatron_offload megatron_bridge bridge nodes2
fp8 ep1 megatron_offload megatron_bridge bridge nodes1
fp8 ep8 megatron megatron_offload bridge nodes1
fp8 graphs offload fsdp_all nodes2
fp8 megatron megatron_offload megatron_bridge bridge nodes1
fp8 megatron_offload megatron_bridge bridge nodes2
fp8 strategy_megatron megatron_offload bridge no_hybrid nodes2
fsdp2 offload fsdp_8 hybrid nodes1
fsdp2 offload no_policy nodes1
fsdp2 offload nodes1
graphs load_dummy_megatron nodes1
graphs nccl strategy_megatron megatron megatron_no_offload megatron_bridge nodes1 separate_async
graphs offload nodes1
graphs sleeps fsdp2 no_offload fsdp_8 nodes1
graphs sleeps fsdp2 no_offload nodes1
graphs sleeps fsdp2 offload fsdp_all nodes2
graphs sleeps fsdp2 offload policy fsdp_8 nodes1
graphs sleeps fsdp_turbo offload policy nodes1
graphs sleeps no_offload nodes1
graphs sleeps no_offload nodes2
graphs sleeps offload fsdp_all nodes2
graphs sleeps staged no_offload nodes1
graphs stays lora32 no_offload nodes1
graphs stays no_offload nodes1
graphs stays one_stage fsdp2 no_offload nodes1
load_auto nodes1
load_dummy lora0 fsdp offload fsdp_all nodes1
load_safetensors lora32 merged fsdp2 no_offload nodes1
load_safetensors lora32 no_offload nodes1
load_safetensors no_offload nodes1
load_safetensors triton no_offload nodes1
lora32 offload fsdp_8 nodes2
megatron bridge nodes1
megatron megatron_offload bridge nodes1
megatron megatron_offload bridge nodes2
megatron megatron_offload megatron_bridge bridge nodes1
megatron megatron_offload megatron_bridge bridge nodes2
megatron megatron_offload nodes1
megatron nodes1
megatron nodes2
megatron_bridge bridge nodes1
megatron_offload
megatron_offload bridge nodes1
megatron_offload bridge nodes2
megatron_offload nodes2
mtp megatron megatron_offload bridge nodes1
mtp mtp_rollout megatron_no_offload bridge no_hybrid nodes1
mtp mtp_rollout mtp_eagle megatron megatron_offload bridge nodes1
nccl fsdp2 megatron no_offload fsdp_8 megatron_no_offload megatron_bridge nodes1 separate_async
no_offload fsdp_all nodes1
no_offload fsdp_all nodes2
no_offload hybrid nodes1
no_offload nodes1
nodes1
nodes1 colocate_async
offload
offload fsdp_8 nodes1
offload fsdp_8 nodes2
offload fsdp_all nodes1
offload fsdp_all nodes2
offload nodes1
offload nodes2
sleeps fsdp2 offload nodes1
sleeps nodes1
sleeps nodes2
sleeps offload nodes1
sleeps offload policy fsdp_8 nodes1
strategy_megatron megatron_offload bridge
strategy_megatron megatron_offload nodes1
triton offload
triton offload nodes2
unquantised megatron_lora0 not_merged megatron_offload megatron_bridge bridge nodes1
veomni nodes1
"""
