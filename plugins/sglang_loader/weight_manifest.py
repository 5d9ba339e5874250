"""What a trainer is about to send, by name, dtype and shape; shared by both sides.

It travels as one compressed message before the first byte of the weights: 18,867 tensors of a
mixture of experts take about 100 kB. The version changes whenever a field does.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

import msgspec
import torch

from sglang_loader.manifest import ManifestError

MANIFEST_VERSION = 1


class AnnouncedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor: its name, torch dtype without the prefix, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tensors of a sync, in the order of the export.

    Attributes:
        version: `MANIFEST_VERSION` of the sender.
        tensors: what it will send.
        is_complete: False: others follow, so that nothing can be missing yet.
    """

    version: int
    tensors: tuple[AnnouncedTensor, ...]
    is_complete: bool = True

    @classmethod
    def of(
        cls,
        specs: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
        *,
        is_complete: bool = True,
    ) -> WeightManifest:
        """Announce `(name, dtype, shape)`."""
        tensors = tuple(
            AnnouncedTensor(name, str(dtype).removeprefix("torch."), tuple(shape))
            for name, dtype, shape in specs
        )
        return cls(version=MANIFEST_VERSION, tensors=tensors, is_complete=is_complete)

    def specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """The tensors as torch describes them.

        Raises:
            ManifestError: a dtype that this torch does not know, or a name that comes twice.
        """
        names = {tensor.name for tensor in self.tensors}
        if len(names) != len(self.tensors):
            raise ManifestError(f"{len(self.tensors)} tensors have only {len(names)} names")
        return [(tensor.name, _dtype_of(tensor), tensor.shape) for tensor in self.tensors]


_decoder = msgspec.msgpack.Decoder(WeightManifest)
_encoder = msgspec.msgpack.Encoder()


def encode_manifest(manifest: WeightManifest) -> bytes:
    """Serialise; `decode_manifest(encode_manifest(m)) == m`."""
    return zlib.compress(_encoder.encode(manifest), level=1)


def decode_manifest(data: bytes) -> WeightManifest:
    """Parse and check.

    Raises:
        ManifestError: not a manifest, or one of another release.
    """
    try:
        manifest = _decoder.decode(zlib.decompress(data))
    except (msgspec.MsgspecError, zlib.error) as error:
        raise ManifestError(f"not a manifest of weights: {error}") from None
    if manifest.version != MANIFEST_VERSION:
        raise ManifestError(
            f"manifest version {manifest.version}, this engine speaks {MANIFEST_VERSION}: the "
            "trainer and the engine have different releases of verl-sglang-sync installed"
        )
    return manifest


def manifest_digest(data: bytes) -> str:
    """Names an encoded manifest."""
    return hashlib.sha256(data).hexdigest()


def _dtype_of(tensor: AnnouncedTensor) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError(f"tensor {tensor.name!r}: unknown dtype {tensor.dtype!r}")
    return dtype
