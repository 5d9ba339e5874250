#!/usr/bin/env bash
# GRPO, FSDP2 trainer + SGLang rollout on the same GPUs: Qwen3-8B on one node of 8.
#
#   MODEL=Qwen/Qwen3-8B DATA=~/data/gsm8k recipes/grpo_fsdp_gpu.sh trainer.total_training_steps=20
#
# DATA holds verl's train.parquet and test.parquet.
# Arguments are Hydra overrides, and win over those below; `--cfg job` as the last one prints the config instead.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B}
DATA=${DATA:-$HOME/data/gsm8k}
GPUS=${GPUS:-8}
NODES=${NODES:-1}
ROLLOUT_TP=${ROLLOUT_TP:-2}
WEIGHT_SYNC=${WEIGHT_SYNC-compiled} # empty: verl's own sync

weight_sync=(
  actor_rollout_ref.rollout.multi_stage_wake_up=True
  ${WEIGHT_SYNC:++weight_sync="$WEIGHT_SYNC"}
)

algorithm=(
  algorithm.adv_estimator=grpo
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.actor.clip_ratio_high=0.28
  actor_rollout_ref.actor.use_kl_loss=False
)

data=(
  data.train_files="$DATA/train.parquet"
  data.val_files="$DATA/test.parquet"
  data.train_batch_size=256
  data.max_prompt_length=1024
  data.max_response_length=4096
  data.filter_overlong_prompts=True
)

actor=(
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  # The optimizer's states leave the GPU while the engine generates.
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
)

rollout=(
  actor_rollout_ref.rollout.name=sglang
  actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7
)

trainer=(
  trainer.nnodes="$NODES"
  trainer.n_gpus_per_node="$GPUS"
  trainer.logger=[console]
  trainer.project_name=weight_sync
  trainer.experiment_name=grpo_fsdp
  trainer.total_epochs=5
  trainer.test_freq=10
  trainer.save_freq=50
)

exec python -m verl.trainer.main_ppo \
  "${weight_sync[@]}" "${algorithm[@]}" "${data[@]}" "${actor[@]}" "${rollout[@]}" \
  "${trainer[@]}" "$@"
