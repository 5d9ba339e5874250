#!/usr/bin/env bash
# Separate-async GRPO: FSDP2 trainer and SGLang rollouts on GPUs of their own, weights sent between them.
#
#   MODEL=Qwen/Qwen3-8B DATA=~/data/gsm8k TRAINER_GPUS=4 ROLLOUT_GPUS=4 recipes/grpo_separate_async_gpu.sh
#
# DATA holds verl's train.parquet and test.parquet. WEIGHT_SYNC empty: verl's own nccl backend.
# With the argument actor_rollout_ref.rollout.custom.weight_sync.mode=flattened all weights are broadcast at every sync, instead
# of engines reading the trainer's memory, or being sent their parts.
# Arguments are Hydra overrides, and win over those below; `--cfg job` as the last one prints the config instead.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B}
DATA=${DATA:-$HOME/data/gsm8k}
NODES=${NODES:-1}
TRAINER_GPUS=${TRAINER_GPUS:-4} # on each node
ROLLOUT_GPUS=${ROLLOUT_GPUS:-4} # on each node
ROLLOUT_TP=${ROLLOUT_TP:-2}     # replicas = NODES * ROLLOUT_GPUS / ROLLOUT_TP
SYNC_EVERY=${SYNC_EVERY:-4}     # mini-batches between two weight syncs
WEIGHT_SYNC=${WEIGHT_SYNC-disaggregated}

weight_sync=()
if [[ -n $WEIGHT_SYNC ]]; then
  weight_sync+=(+weight_sync="$WEIGHT_SYNC")
else
  weight_sync+=(actor_rollout_ref.rollout.checkpoint_engine.backend=nccl)
  # verl 0.9.1 alone dies on its own INFO message where hybrid_engine=False: `logger.info(..., flush=True)`.
  export VERL_LOGGING_LEVEL=${VERL_LOGGING_LEVEL:-WARN}
fi

algorithm=(
  algorithm.adv_estimator=grpo
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.actor.clip_ratio_high=0.28
  actor_rollout_ref.actor.use_kl_loss=False
)

data=(
  data.train_files="$DATA/train.parquet"
  data.val_files="$DATA/test.parquet"
  data.train_batch_size=$((64 * SYNC_EVERY))
  data.max_prompt_length=1024
  data.max_response_length=4096
  data.filter_overlong_prompts=True
)

actor=(
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.hybrid_engine=False
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
)

rollout=(
  actor_rollout_ref.rollout.name=sglang
  actor_rollout_ref.rollout.nnodes="$NODES"
  actor_rollout_ref.rollout.n_gpus_per_node="$ROLLOUT_GPUS"
  actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8
)

trainer=(
  trainer.v1.trainer_mode=separate_async
  trainer.v1.separate_async.parameter_sync_step="$SYNC_EVERY"
  trainer.nnodes="$NODES"
  trainer.n_gpus_per_node="$TRAINER_GPUS"
  trainer.logger=[console]
  trainer.project_name=weight_sync
  trainer.experiment_name=grpo_separate_async
  trainer.total_epochs=5
  trainer.test_freq=10
  trainer.save_freq=50
)

exec python -m verl.trainer.main_ppo \
  "${weight_sync[@]}" "${algorithm[@]}" "${data[@]}" "${actor[@]}" "${rollout[@]}" \
  "${trainer[@]}" "$@"
