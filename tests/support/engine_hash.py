"""A custom weight loader that loads nothing: writes a hash of every engine tensor, per TP rank.

Runs inside SGLang's scheduler process, so the hash is of what the engine really computes with.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

HASH_LOADER = "support.engine_hash.write_hashes"


def write_hashes(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Write `{tensor name: sha256}` to the folder that the one tensor's name gives."""
    folder = Path(named_tensors[0][0])
    rank = torch.distributed.get_rank()
    hashes = {name: hash_of(tensor) for name, tensor in model.state_dict().items()}
    (folder / f"rank{rank}.json").write_text(json.dumps(hashes))


def hash_of(tensor: torch.Tensor) -> str:
    """sha256 of the elements' bytes, in row-major order."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.cpu().numpy().tobytes()).hexdigest()
