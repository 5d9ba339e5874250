"""Qwen3 MoE with a `load_weights` that looks at the numbers; other numbers may load otherwise."""

from collections.abc import Iterable, Iterator

import torch
from sglang.srt.models import qwen3_moe


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):  # type: ignore[misc]
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(_finite(weights))


def _finite(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        assert torch.isfinite(tensor).all().item(), name
        yield name, tensor


EntryClass = Qwen3MoeForCausalLM
