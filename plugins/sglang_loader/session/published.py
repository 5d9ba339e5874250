"""Names and shapes of the checkpoint that an engine serves, from the headers of its files.

A published checkpoint shows what is normal for its model: tensors that SGLang drops, parameters
that no checkpoint has. Only headers are read, a few kilobytes of each file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

MAX_HEADER_BYTES = 100 << 20  # the format's own limit

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

Spec = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, dtype, shape)."""

Published = Mapping[str, Spec]


def published_tensors(folder: str | Path) -> Published | None:
    """All tensors of the safetensors files in `folder`, by name.

    Returns:
        None where there is no such checkpoint: no folder (a name on the hub), other file formats,
        a dtype that torch does not have, or files that do not follow the format.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return None
    files = _files(folder)
    found: dict[str, Spec] = {}
    try:
        for file in files:
            for name, entry in _header(file).items():
                if name != "__metadata__":
                    shape = tuple(int(size) for size in entry["shape"])
                    found[name] = name, _DTYPES[entry["dtype"]], shape
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return found or None


def _files(folder: Path) -> list[Path]:
    """Those of the index, where there is one: a folder may hold a second copy of the weights."""
    index = folder / "model.safetensors.index.json"
    try:
        named = json.loads(index.read_text())["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError):
        return sorted(folder.glob("*.safetensors"))
    return sorted(folder / name for name in set(named))


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """The JSON header: its length as 8 bytes, little-endian, stands before it."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{file} has a header of {length} bytes")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file} has no header")
    return header
