#!/usr/bin/env bash
# GRPO of a tiny model on a CPU, with real verl and real SGLang processes; for development.
#
#   python recipes/tiny_assets.py outputs/tiny
#   ASSETS=outputs/tiny recipes/grpo_cpu_tiny.sh trainer.total_training_steps=3
#
# ASSETS holds model/ (with its tokenizer), train.parquet and val.parquet.
# Arguments are Hydra overrides, and win over those below; `--cfg job` as the last one prints the config instead.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ASSETS=$(realpath -m "${ASSETS:-outputs/tiny}")
WORKERS=${WORKERS:-1} # trainer processes; replicas = WORKERS / ROLLOUT_TP
ROLLOUT_TP=${ROLLOUT_TP:-1}
WEIGHT_SYNC=${WEIGHT_SYNC-compiled} # empty: verl's own sync

# verl imports cpu_platform.py of this folder in all its processes.
export VERL_PLATFORM=cpu
export VERL_USE_EXTERNAL_MODULES="cpu_platform${VERL_USE_EXTERNAL_MODULES:+,$VERL_USE_EXTERNAL_MODULES}"
export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0

weight_sync=(
  actor_rollout_ref.rollout.multi_stage_wake_up=True
  ${WEIGHT_SYNC:++weight_sync="$WEIGHT_SYNC"}
)

algorithm=(
  algorithm.adv_estimator=grpo
  actor_rollout_ref.rollout.n=4
  actor_rollout_ref.actor.use_kl_loss=False
)

data=(
  data.train_files="$ASSETS/train.parquet"
  data.val_files="$ASSETS/val.parquet"
  data.train_batch_size=4
  data.max_prompt_length=64
  data.max_response_length=16
  data.dataloader_num_workers=0
  data.shuffle=False
  reward.num_workers=1
  reward.custom_reward_function.path="$HERE/tiny_reward.py"
  reward.custom_reward_function.name=compute_score
)

# fp32 on both sides, so that a weight that did not arrive shows in rollout_probs_diff_max.
actor=(
  actor_rollout_ref.model.path="$ASSETS/model"
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa
  actor_rollout_ref.model.use_remove_padding=False
  actor_rollout_ref.model.enable_gradient_checkpointing=False
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.use_torch_compile=False
  actor_rollout_ref.actor.optim.lr=1e-2
  actor_rollout_ref.actor.ppo_mini_batch_size=4
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
  actor_rollout_ref.actor.fsdp_config.dtype=float32
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32
)

rollout=(
  actor_rollout_ref.rollout.name=sglang
  actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"
  actor_rollout_ref.rollout.dtype=float32
  actor_rollout_ref.rollout.load_format=dummy
  actor_rollout_ref.rollout.enforce_eager=True
  actor_rollout_ref.rollout.gpu_memory_utilization=0.2
  actor_rollout_ref.rollout.max_num_seqs=16
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
  actor_rollout_ref.rollout.calculate_log_probs=True
  actor_rollout_ref.rollout.agent.num_workers=1
  +actor_rollout_ref.rollout.engine_kwargs.sglang.device=cpu
  +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=torch_native
  +actor_rollout_ref.rollout.engine_kwargs.sglang.sampling_backend=pytorch
  +actor_rollout_ref.rollout.engine_kwargs.sglang.disable_overlap_schedule=True
  +actor_rollout_ref.rollout.engine_kwargs.sglang.sleep_on_idle=True
  +actor_rollout_ref.rollout.engine_kwargs.sglang.max_total_tokens=4096
  +actor_rollout_ref.rollout.engine_kwargs.sglang.enable_memory_saver=False
)

trainer=(
  trainer.device=cpu
  trainer.n_gpus_per_node="$WORKERS"
  trainer.logger=[console,file]
  trainer.total_epochs=100
  trainer.total_training_steps=2
  trainer.val_before_train=False
  trainer.test_freq=-1
  trainer.save_freq=-1
  trainer.resume_mode=disable
  +ray_kwargs.ray_init.num_gpus="$WORKERS" # logical: one worker process each
  ray_kwargs.ray_init.num_cpus=$((4 * WORKERS + 4))
  +ray_kwargs.ray_init.include_dashboard=False
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1
)

if ((ROLLOUT_TP > 1)); then # SGLang then wants a core named for each rank
  cores=$(seq -s '|' 0 $((ROLLOUT_TP - 1)))
  export SGLANG_CPU_OMP_THREADS_BIND=${SGLANG_CPU_OMP_THREADS_BIND:-$cores}
fi

exec python -m verl.trainer.main_ppo \
  "${weight_sync[@]}" "${algorithm[@]}" "${data[@]}" "${actor[@]}" "${rollout[@]}" \
  "${trainer[@]}" "$@"
