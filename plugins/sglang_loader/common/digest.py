"""128-bit digests of tensors, taken on their device: two position-weighted sums of 64-bit words."""

from __future__ import annotations

import torch

CHUNK_WORDS = 4 << 20
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Of one tensor's elements: int64 of shape `[2]` on its device; not waited for."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return digest_bytes(data, position_weights(min(data.numel() // 8, CHUNK_WORDS), data.device))


def digest_bytes(data: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Two sums of a storage's words, by the place of each.

    Args:
        weights: `position_weights`, of at least as many words as the storage or a chunk has.
    """
    num_words, rest = divmod(data.numel(), 8)
    parts = []
    if rest or not num_words:
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[:rest].copy_(data[8 * num_words :])
        parts.append(tail.view(torch.int64).expand(2))
    words = data[: 8 * num_words].view(torch.int64)
    for start in range(0, num_words, CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        parts.append((weights[:, : chunk.numel()] * chunk).sum(dim=1))
    total = parts[0]
    if len(parts) > 1:
        scale = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=data.device)
        for part in parts[1:]:
            total = total * scale + part
    return total


def position_weights(num_words: int, device: torch.device) -> torch.Tensor:
    """Odd factors `[2, num_words]`, made once for all chunks: 61 GB have two thousand of them."""
    place = torch.arange(1, num_words + 1, dtype=torch.int64, device=device)
    weights = torch.stack([place * multiplier for multiplier in _MULTIPLIERS])
    weights.bitwise_xor_(weights >> 29)
    return weights.mul_(_MULTIPLIERS[1]).bitwise_or_(1)
