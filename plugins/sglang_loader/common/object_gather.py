"""Collectives of Python objects in a process group, one collective if all objects are short."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

AllGather = Callable[[list[torch.Tensor], torch.Tensor], object]
"""A function that fills the list with the tensor of each rank, and waits for the result."""

HEADER_NBYTES = 8
SHORT_NBYTES = 1024
"""Bytes of each object in the first collective. If an object is longer, a second collective carries
all objects."""


def gather_objects(item: Any, num_ranks: int, all_gather: AllGather) -> list[Any]:
    """Return every rank's `item`, by rank. Collective.

    The ranks trust each other: items are pickled.
    """
    # The length comes first, so that every rank can compute the longest message.
    data = pickle.dumps(item)
    message = len(data).to_bytes(HEADER_NBYTES, "little") + data

    def exchange(nbytes: int) -> list[bytes]:
        own = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        sent = bytearray(message[:nbytes])
        own[: len(sent)] = torch.frombuffer(sent, dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(num_ranks)]
        all_gather(rows, own)
        return [row.numpy().tobytes() for row in rows]

    rows = exchange(SHORT_NBYTES)
    needed = max(HEADER_NBYTES + int.from_bytes(row[:HEADER_NBYTES], "little") for row in rows)
    if needed > SHORT_NBYTES:
        rows = exchange(needed)
    return [pickle.loads(row[HEADER_NBYTES:]) for row in rows]  # stops where the pickle ends
