"""A dense, deterministic reward for the tiny CPU runs: the share of ASCII letters in the answer."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """verl's custom reward interface; between 0 and 1."""
    letters = sum(char.isascii() and char.isalpha() for char in solution_str)
    return letters / max(1, len(solution_str))
