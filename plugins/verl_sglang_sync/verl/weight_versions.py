"""Reports the version of the weights with which each token of a rollout was sampled.

    output.extra_fields["weight_versions"] == [[17, 3], [5, 4]]  # 17 tokens of step 3, 5 of step 4

verl aborts a rollout when a disaggregated sync begins, requests the remaining tokens afterwards,
and joins the parts. verl reports the first and the last version. Our client also reports the
version of each part. Agent loops pass `extra_fields` to the trainer's batch.
"""

from __future__ import annotations

import functools
from typing import Any

from verl.workers.rollout.llm_server import (
    FullyAsyncLLMServerClient,
    LLMServerClient,
    LLMServerManager,
)


class PartClient(LLMServerClient):  # type: ignore[misc]
    """Client that records the version of each part.

    In the method order of `WeightVersionsClient` this class comes between verl's two clients, so
    that `generate` is called once for each part.
    """

    async def generate(
        self, request_id: str, *, weight_versions: list[list[int]], **kwargs: Any
    ) -> Any:
        output = await super().generate(request_id, **kwargs)
        num_tokens, version = len(output.token_ids), output.extra_fields["global_steps"]
        if weight_versions and weight_versions[-1][1] == version:
            weight_versions[-1][0] += num_tokens  # aborted for another reason than a sync
        elif num_tokens:
            weight_versions.append([num_tokens, version])
        return output


class WeightVersionsClient(FullyAsyncLLMServerClient, PartClient):  # type: ignore[misc]
    """verl's asynchronous client, with the version of every token in its responses.

    `extra_fields["weight_versions"]` lists `[num_tokens, global_steps]` in the order of the tokens.
    The numbers add up to the number of tokens of the response.
    """

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        weight_versions: list[list[int]] = []
        output = await super().generate(request_id, weight_versions=weight_versions, **kwargs)
        counted, num_tokens = sum(num for num, _ in weight_versions), len(output.token_ids)
        assert counted == num_tokens, f"the parts have {counted} tokens, the response {num_tokens}"
        output.extra_fields["weight_versions"] = weight_versions
        return output


def report_weight_versions() -> None:
    """Make verl's `LLMServerManager` return our client instead of verl's asynchronous client."""
    # verl's trainers name the class of the client in their code. No setting changes the class.
    # Agent loops get the client pickled.
    original = LLMServerManager.get_client
    if getattr(original, "reports_weight_versions", False):
        return

    @functools.wraps(original)
    def get_client(self: Any, client_cls: Any = None, **kwargs: Any) -> Any:
        ours = WeightVersionsClient if client_cls is FullyAsyncLLMServerClient else client_cls
        return original(self, client_cls=ours, **kwargs)

    get_client.reports_weight_versions = True  # type: ignore[attr-defined]
    LLMServerManager.get_client = get_client
