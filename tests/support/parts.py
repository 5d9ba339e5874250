"""verl imports this module (VERL_USE_EXTERNAL_MODULES): each part of a response is written down
when a server has sampled it.

One JSON object a line, in the file that the environment variable `PARTS` names: the server's
address, the prompt with the tokens so far, the tokens, their log probabilities, and the version of
the weights that the server names.

With `STAGGER_S` a request waits for up to seven times as many seconds, by its tokens. Else all
responses of one length end at once, and a sync that comes then interrupts none.
"""

import asyncio
import json
import os
import zlib
from pathlib import Path
from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient

_acquire_server = LLMServerClient._acquire_server


class _RecordedServer:
    """A server's handle, of which verl's client calls `generate.remote` alone."""

    def __init__(self, address: str, handle: Any) -> None:
        self._address, self._handle = address, handle

    @property
    def generate(self) -> "_RecordedServer":
        return self

    async def remote(self, *, prompt_ids: list[int], **more: Any) -> Any:
        number = zlib.crc32(bytes(token % 256 for token in prompt_ids)) % 8
        await asyncio.sleep(float(os.environ.get("STAGGER_S", 0)) * number)
        output = await self._handle.generate.remote(prompt_ids=prompt_ids, **more)
        part = {
            "server": self._address,
            "prompt": [int(token) for token in prompt_ids],
            "tokens": output.token_ids,
            "log_probs": output.log_probs,
            "version": output.extra_fields["global_steps"],
        }
        with Path(os.environ["PARTS"]).open("a") as file:
            file.write(json.dumps(part) + "\n")
        return output


async def acquire_server(self: Any, request_id: str, **extra: Any) -> tuple[str, Any]:
    address, handle = await _acquire_server(self, request_id, **extra)
    return address, _RecordedServer(address, handle)


LLMServerClient._acquire_server = acquire_server
