"""The recipes' tiny assets, for tests: `make_assets(folder, architecture=..., tied=...)`."""

from __future__ import annotations

import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.append(str(RECIPES))

from tiny_assets import make_assets  # noqa: E402

__all__ = ["RECIPES", "make_assets"]
