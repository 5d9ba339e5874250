"""verl imports this module (VERL_USE_EXTERNAL_MODULES): its trainer writes down the trajectories of
each batch when it has trained on them.

One JSON object a line, in the file that the environment variable `GENERATIONS` names. While the
trainer trains on a batch, and until the sync after it, the file that `TRAINING` names is there. In
the second step the training begins when the engine has begun a few passes since.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

STEP, PASSES, LIMIT_S = 2, 4, 120.0  # the slow model notes each pass with a byte in the file
TENSORS = ["prompts", "responses", "rollout_log_probs"]
VERSIONS = ("min_global_steps", "max_global_steps", "weight_versions")

_kv_clear = transfer_queue.kv_clear
_on_sample_end = PPOTrainerSeparateAsync.on_sample_end
_on_step_end = PPOTrainerSeparateAsync.on_step_end


def kv_clear(keys: list[str], partition_id: str) -> None:
    """The trainer forgets prompts, whose keys have no "_", and trajectories that way."""
    if trajectories := [key for key in keys if "_" in key]:
        data = transfer_queue.kv_batch_get(trajectories, partition_id, [*TENSORS, "extra_fields"])
        tensors = (data[name].unbind() for name in TENSORS)
        with Path(os.environ["GENERATIONS"]).open("a") as file:
            for *rows, extra in zip(*tensors, data["extra_fields"], strict=True):
                prompt, tokens, log_probs = (row.tolist() for row in rows)
                generation = {"prompt": prompt, "tokens": tokens, "log_probs": log_probs}
                versions = {name: extra[name] for name in VERSIONS}
                file.write(json.dumps(generation | versions) + "\n")
    _kv_clear(keys=keys, partition_id=partition_id)


def on_sample_end(self: Any) -> None:
    _on_sample_end(self)
    file, deadline = Path(os.environ["TRAINING"]), time.monotonic() + LIMIT_S
    file.touch()
    while self.global_steps == STEP and file.stat().st_size < PASSES:
        assert time.monotonic() < deadline, "the engine has nothing to do"
        time.sleep(0.1)


def on_step_end(self: Any) -> None:
    _on_step_end(self)
    Path(os.environ["TRAINING"]).unlink()


transfer_queue.kv_clear = kv_clear
PPOTrainerSeparateAsync.on_sample_end = on_sample_end
PPOTrainerSeparateAsync.on_step_end = on_step_end
