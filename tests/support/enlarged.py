"""A tiny model's config made large, for GPUs."""

import json
from pathlib import Path
from typing import Any

LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""A model of 2 GB in bfloat16, for a GPU: its buckets take longer to read than to announce."""


def enlarge(model: Path, **options: Any) -> None:
    """Rewrite the config in a dense model's folder, whose weights do not fit it any more."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    config.pop("layer_types", None)
    path.write_text(json.dumps({**config, **LARGE, **options}))
