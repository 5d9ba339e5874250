"""The manifest check of one rank, as the tests of tiny architectures call it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from contract.tiny_architectures import NamedWeights
from sglang_loader.load_plan.destinations import Destinations, collect_destinations
from sglang_loader.load_plan.verify import snapshot
from sglang_loader.manifest_check import check_manifest
from sglang_loader.rehearsal import Spec
from sglang_loader.weight_manifest import ManifestVerdict, WeightManifest, encode_manifest


def specs_of(weights: NamedWeights) -> list[Spec]:
    """Name, dtype and shape of each tensor."""
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]


def check(
    model: nn.Module, specs: Sequence[Spec], *, published: Sequence[Spec] | None
) -> ManifestVerdict:
    """The verdict on a manifest for an engine of one rank."""
    known = None if published is None else {spec[0]: spec for spec in published}
    return check_manifest(
        encode_manifest(WeightManifest.of(specs)), [model], lambda item: [item], lambda: known
    )


def untouched(model: nn.Module) -> tuple[Destinations, list[torch.Tensor]]:
    """Where all of the model's tensors are, and their bytes."""
    destinations = collect_destinations(model)
    return destinations, snapshot(destinations)
