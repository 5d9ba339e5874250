"""For SGLang (SGLANG_EXTERNAL_MODEL_PACKAGE) on a host without a GPU: speculative decoding.

Its Triton kernels run in Triton's interpreter (`support.forks` sets TRITON_INTERPRET, which is read
as they are imported). What it has in CUDA alone is here, for chains of drafted tokens (`topk` 1).
"""

from typing import Any

import torch
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.triton_ops import cache_locs

Tensor = torch.Tensor


def build_chain(
    parents: Tensor,
    scores: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    num_steps: int,
    num_tokens: int,
    mask_mode: int,
) -> None:
    """`build_tree_kernel_efficient`: each token sees all before it, and is followed by the next."""
    assert topk == 1 and mask_mode == eagle_utils.TreeMaskMode.FULL_MASK
    numbers, end = torch.arange(num_tokens), 0
    for row, length in enumerate(seq_lens.tolist()):
        start, end = end, end + num_tokens * (length + num_tokens)
        mask = tree_mask[start:end].view(num_tokens, length + num_tokens)
        mask.copy_(torch.ones_like(mask).tril(length))
        positions[row * num_tokens : (row + 1) * num_tokens] = length + numbers
        index[row] = row * num_tokens + numbers
        next_token[row] = torch.where(numbers + 1 < num_tokens, numbers + 1, -1)
        next_sibling[row] = -1


def verify_chain(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`verify_tree_greedy_func`: the drafted tokens up to the first that is not the target's."""
    assert topk == 1
    for row, (drafted, predicted) in enumerate(zip(candidates, target_predict, strict=True)):
        is_right = (drafted[1:] == predicted[:-1]).int()
        num_right = int(is_right.cumprod(0).sum())
        places = retrieve_index[row, : num_right + 1]
        predicts[places] = predicted[: num_right + 1].to(predicts.dtype)
        accept_index[row, : num_right + 1] = places.to(accept_index.dtype)
        accept_token_num[row] = num_right
    return predicts, accept_index, accept_token_num


def nothing(*_: Any) -> None:
    """There is no GPU to wait for."""


patched: Any = eagle_utils
patched.sgl_build_tree_kernel_efficient = build_chain
patched.verify_tree_greedy_func = verify_chain
cache_locs._is_cuda = True  # takes the Triton kernel
torch.cuda.synchronize = torch.cuda.empty_cache = nothing  # type: ignore[assignment]
