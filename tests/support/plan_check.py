"""Buckets, the proof of a whole plan at once, what its syncs leave as it was, and every byte
compared.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan.compiler import compile_bucket, join_buckets
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import LoadPlan
from sglang_loader.load_plan.tracer import trace_bucket
from sglang_loader.load_plan.verify import Digests, check_bucket


def packed(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[BucketLayout, torch.Tensor]:
    """One bucket's layout and its filled buffer."""
    named = list(weights)
    layout = BucketLayout.pack((name, tensor.shape, tensor.dtype) for name, tensor in named)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=named[0][1].device)
    for (_, view), (_, tensor) in zip(layout.views(buffer), named, strict=True):
        view.copy_(tensor)
    return layout, buffer


def random_bucket(
    sources: Iterable[tuple[str, tuple[int, ...], torch.dtype]], seed: int, device: str = "cpu"
) -> tuple[BucketLayout, torch.Tensor]:
    """A bucket of random tensors with these names, shapes and dtypes."""
    generator = torch.Generator(device).manual_seed(seed)
    return packed(
        (name, torch.randn(shape, generator=generator, device=device).to(dtype))
        for name, shape, dtype in sources
    )


def planned(model: nn.Module, *buckets: tuple[BucketLayout, torch.Tensor]) -> LoadPlan:
    """The plan of what the model does with these buckets, each a layout and its buffer."""
    plans, found = [], None
    for layout, buffer in buckets:
        traced = trace_bucket(model, model.load_weights, layout, buffer, found)
        found = traced.destinations
        plans.append(compile_bucket(traced))
    assert found is not None
    return join_buckets(plans, found)


def self_check(model: nn.Module, plan: LoadPlan, buffers: Sequence[torch.Tensor]) -> str | None:
    """`check_bucket` for every bucket of a plan; stops at the first that fails, and says why.

    Args:
        buffers: one flat buffer per bucket, filled with this sync's weights.

    Afterwards the weights are those of `buffers`, whatever the outcome.
    """
    known: Digests = {}
    load_weights = model.load_weights
    for i, (bucket, buffer) in enumerate(zip(plan.buckets, buffers, strict=True)):
        reason = check_bucket(model, bucket, plan.destinations, load_weights, buffer, known)
        if reason is not None:
            for left, later in zip(plan.buckets[i + 1 :], buffers[i + 1 :], strict=True):
                load_weights(iter(left.layout.views(later[: left.layout.nbytes].clone())))
            return reason
    return None


def uncovered(plan: LoadPlan, kind: str | None = None) -> list[str]:
    """The model's tensors, all or of a kind, with a byte that a sync does not write."""
    names = [storage.name for storage in plan.destinations.storages]
    return [
        tensor.name
        for tensor in plan.destinations.tensors
        if kind in (None, tensor.kind)
        and not tensor.lies_in(plan.coverage.get(names[tensor.storage], ()))
    ]


def snapshot(destinations: Destinations) -> list[torch.Tensor]:
    """The bytes of every storage, copied."""
    return [destinations.memory[i].clone() for i in range(len(destinations.storages))]


def differing(destinations: Destinations, expected: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """The paths of all tensors whose storage does not hold the bytes of `expected` (from
    `snapshot`).
    """
    return tuple(
        name
        for i, want in enumerate(expected)
        if not torch.equal(destinations.memory[i], want)
        for name in destinations.names_of(i)
    )
