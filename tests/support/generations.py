"""verl imports this module (VERL_USE_EXTERNAL_MODULES): its asynchronous client writes down what
an agent loop got for each of its requests.

One JSON object a line, in the file that the environment variable `GENERATIONS` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

_generate = FullyAsyncLLMServerClient.generate


async def generate(self: Any, request_id: str, *, prompt_ids: Any, **kwargs: Any) -> Any:
    output = await _generate(self, request_id, prompt_ids=prompt_ids, **kwargs)
    generation = {
        "prompt": list(prompt_ids),
        "tokens": output.token_ids,
        "log_probs": output.log_probs,
        "min_version": output.extra_fields["min_global_steps"],
        "max_version": output.extra_fields["max_global_steps"],
    }
    with Path(os.environ["GENERATIONS"]).open("a") as file:
        file.write(json.dumps(generation) + "\n")
    return output


FullyAsyncLLMServerClient.generate = generate
