"""SGLang custom weight loaders: load one bucket and return only when the GPU is done with it.

SGLang calls them in each TP worker for an `update_weights_from_tensor` request whose `load_format`
is their dotted path (`FLATTENED_LOADER`, `NAMED_LOADER`).
Returning after the stream has finished is what lets the trainer reuse its staging buffer for the
next bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sglang_loader.manifest import BucketManifest, ManifestError, SyncSequence, decode

FLATTENED_LOADER = "sglang_loader.bucket_loader.load_flattened_bucket"
NAMED_LOADER = "sglang_loader.bucket_loader.load_named_tensors"
LOADERS = (FLATTENED_LOADER, NAMED_LOADER)

NamedTensors = Sequence[tuple[str, torch.Tensor]]

# Speculative decoding loads every bucket twice in one process: into the draft and the target model.
_sequences: WeakKeyDictionary[Any, SyncSequence] = WeakKeyDictionary()


def is_ours(server_args: Any) -> bool:
    """True where the server was launched with our loaders."""
    return any(path in LOADERS for path in server_args.custom_weight_loader or ())


def load_flattened_bucket(model: Any, named_tensors: NamedTensors) -> None:
    """Load a bucket that came as one flat buffer.

    Args:
        model: the SGLang model; its own `load_weights` places every tensor.
        named_tensors: one pair: the bucket's manifest (`sglang_loader.manifest.encode`) and the
            flat buffer, uint8 of shape `[manifest.nbytes]`, on the model's device.

    Raises:
        ManifestError: the request does not follow the wire format or the sync's order.
    """
    if len(named_tensors) != 1:
        raise ManifestError(
            f"a flattened bucket is one (manifest, buffer), got {len(named_tensors)}"
        )
    text, flat = named_tensors[0]
    manifest = decode(text)
    if flat.dtype != torch.uint8 or flat.dim() != 1 or flat.numel() < manifest.nbytes:
        raise ManifestError(
            f"bucket {manifest.index}: buffer is {flat.dtype} of shape {tuple(flat.shape)}, "
            f"expected uint8 of at least {manifest.nbytes} bytes"
        )
    _sequences.setdefault(model, SyncSequence()).accept(manifest)
    model.load_weights(tensor_views(manifest, flat))
    synchronize(flat.device)


def load_named_tensors(model: Any, named_tensors: NamedTensors) -> None:
    """Load a bucket that came as separate tensors, `[(name, tensor), ...]`."""
    model.load_weights(list(named_tensors))
    for device in {tensor.device for _, tensor in named_tensors}:
        synchronize(device)


def tensor_views(manifest: BucketManifest, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """View the flat buffer as the manifest's tensors; no byte is copied.

    Raises:
        ManifestError: a dtype this torch does not know, or bytes that do not hold the shape.
    """
    views = []
    for entry in manifest.tensors:
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ManifestError(f"tensor {entry.name!r}: unknown dtype {entry.dtype!r}")
        try:
            raw = flat[entry.offset : entry.offset + entry.nbytes]
            views.append((entry.name, raw.view(dtype).view(entry.shape)))
        except RuntimeError as error:
            raise ManifestError(f"tensor {entry.name!r}: {error}") from None
    return views


def synchronize(device: torch.device) -> None:
    """Wait until the current stream of `device` has run everything; nothing to do on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
