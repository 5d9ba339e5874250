"""verl imports this module (VERL_USE_EXTERNAL_MODULES): its trainer writes down the trajectories of
each batch when it has trained on them.

One JSON object a line, in the file that the environment variable `GENERATIONS` names.
"""

import json
import os
from pathlib import Path

import transfer_queue

TENSORS = ["prompts", "responses", "rollout_log_probs"]
VERSIONS = ("min_global_steps", "max_global_steps", "weight_versions")

_kv_clear = transfer_queue.kv_clear


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


transfer_queue.kv_clear = kv_clear
