"""The check of one rank, as the tests of tiny architectures call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from contract.tiny_architectures import NamedWeights
from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan.destinations import Destinations, collect_destinations
from sglang_loader.load_plan.verify import differing, snapshot
from sglang_loader.rehearsal import Spec
from sglang_loader.rehearsal.findings import Verdict
from sglang_loader.session.weight_check import Gather, judge_together, view_of_sync


def specs_of(weights: NamedWeights) -> list[Spec]:
    """Name, dtype and shape of each tensor."""
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]


def _alone(item: Any) -> list[Any]:
    return [item]


def check(
    model: nn.Module,
    specs: Sequence[Spec],
    *,
    published: Sequence[Spec] | None,
    gather: Gather = _alone,
) -> Verdict:
    """The verdict on a sync, by default for an engine of one rank."""
    known = None if published is None else {spec[0]: spec for spec in published}
    return judge_together(view_of_sync([layout_of(specs)], [model], lambda: known), gather)


def layout_of(specs: Sequence[Spec]) -> BucketLayout:
    """All tensors in one bucket."""
    return BucketLayout.pack((name, shape, dtype) for name, dtype, shape in specs)


def with_three_faults(specs: Sequence[Spec]) -> tuple[list[Spec], tuple[str, str, str]]:
    """(tensors, (missing, mismatched, unexpected)): one tensor of a layer is left out, one is
    doubled, one is strange.
    """
    layers = [spec for spec in specs if ".layers." in spec[0] and len(spec[2]) == 2]
    lost, doubled = layers[0], layers[-1]
    name, dtype, shape = doubled
    strange = f"{name}_of_another_model"
    kept = [spec for spec in specs if spec not in (lost, doubled)]
    kept += [(name, dtype, (2 * shape[0], *shape[1:])), (strange, dtype, shape)]
    return kept, (lost[0], name, strange)


def check_on_ranks(model: nn.Module, weights: NamedWeights, gather: Gather) -> dict[str, Any]:
    """What the ranks say of a complete sync, and of one with three faults."""
    specs = specs_of(weights)
    before, content = untouched(model)
    faulty, wanted = with_three_faults(specs)
    verdict = check(model, faulty, published=specs, gather=gather)
    found = verdict.missing, verdict.mismatched, verdict.unexpected
    return {
        "complete": check(model, specs, published=specs, gather=gather).text(),
        "blind": check(model, specs, published=None, gather=gather).text(),
        "found": [[text.split(" ")[0] for text in texts] for texts in found],
        "wanted": [[name] for name in wanted],
        "changed": list(differing(before, content)),
    }


def untouched(model: nn.Module) -> tuple[Destinations, list[torch.Tensor]]:
    """Where all of the model's tensors are, and their bytes."""
    destinations = collect_destinations(model)
    return destinations, snapshot(destinations)
