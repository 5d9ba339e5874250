#!/usr/bin/env bash
# GRPO, Megatron trainer + SGLang rollout on the same GPUs: Qwen3-30B-A3B on one node of 8.
#
#   MODEL=Qwen/Qwen3-30B-A3B DATA=~/data/gsm8k recipes/grpo_megatron_gpu.sh
#
# Needs `pip install -e '.[megatron]'` in the clone, and a Transformer Engine built for this torch.
# DATA holds verl's train.parquet and test.parquet.
# Arguments are Hydra overrides, and win over those below; `--cfg job` as the last one prints the config instead.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}
DATA=${DATA:-$HOME/data/gsm8k}
GPUS=${GPUS:-8}
NODES=${NODES:-1}
TRAIN_TP=${TRAIN_TP:-2}
TRAIN_EP=${TRAIN_EP:-8}
ROLLOUT_TP=${ROLLOUT_TP:-4}
WEIGHT_SYNC=${WEIGHT_SYNC-compiled} # empty: verl's own sync

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron's overlap relies on the launch order

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
  model_engine=megatron # verl 0.9.1: replaces --config-name=ppo_megatron_trainer
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TRAIN_TP"
  actor_rollout_ref.actor.megatron.expert_model_parallel_size="$TRAIN_EP"
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
  # With mbridge every sync exports. With verl's default, vanilla_mbridge=False, engines read in place, but megatron-bridge
  # 0.3.1 (not 0.5.0 or 0.6.2) does not find rope_theta with transformers 5: then add, for Qwen3,
  # +actor_rollout_ref.actor.megatron.override_transformer_config.rotary_base=1000000
  actor_rollout_ref.actor.megatron.vanilla_mbridge=True
  actor_rollout_ref.actor.megatron.param_offload=True
  actor_rollout_ref.actor.megatron.optimizer_offload=True
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
  trainer.experiment_name=grpo_megatron
  trainer.total_epochs=5
  trainer.test_freq=10
  trainer.save_freq=50
)

exec python -m verl.trainer.main_ppo \
  "${weight_sync[@]}" "${algorithm[@]}" "${data[@]}" "${actor[@]}" "${rollout[@]}" \
  "${trainer[@]}" "$@"
