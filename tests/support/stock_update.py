"""SGLang's own update by broadcast, which our trainers never send: for engines to refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verl_sglang_sync.engine.server_client.operations import UPDATE, Call


def update_from_distributed(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    group_name: str,
    load_format: str | None = None,
    flush_cache: bool = False,
) -> Call:
    """Load tensors that the trainer broadcasts in `group_name`."""
    payload = {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
        "load_format": load_format,
        "flush_cache": flush_cache,
        "weight_version": None,
    }
    return Call(replace(UPDATE, path="update_weights_from_distributed"), payload)
