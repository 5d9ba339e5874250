"""Cuts a stream of tensors into buckets: pure, and the same on every rank.

A bucket is a run of tensors whose bytes fit a limit. Tensors that the engine's `load_weights`
combines within one call (a fusion group) are never cut apart. The planner sees names, shapes and
dtypes only, one at a time, because verl's trainers export weights as a generator:

    planner = BucketPlanner(bucket_bytes=512 << 20)
    for spec in specs:
        for bucket in planner.add(spec):
            ...
    for bucket in planner.finish():
        ...

Every tensor lands in exactly one bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALIGNMENT_BYTES = 256  # what cudaMalloc gives; keeps every dtype's view legal and copies vectorised


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What the planner knows of one tensor.

    Attributes:
        name: parameter name as the trainer exports it (Hugging Face names).
        shape: dimensions; an empty tuple is a scalar, a 0 makes the tensor empty.
        dtype: torch dtype without the prefix, such as "bfloat16".
        itemsize: bytes of one element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements, without padding."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Slot:
    """Where one tensor's bytes lie in its bucket: `[offset, offset + spec.nbytes)`."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: slots in sending order, non-overlapping, at multiples of `ALIGNMENT_BYTES`.

    Attributes:
        index: position in the sync, from 0.
        slots: the tensors.
        nbytes: size of the staging buffer that holds the bucket, padding included.
        last: True for the sync's final bucket.
    """

    index: int
    slots: tuple[Slot, ...]
    nbytes: int
    last: bool


FusionGroup = tuple[str, ...]
"""Name suffixes of tensors that share a prefix and must travel together."""

# Which tensors an engine's loader concatenates inside one `load_weights` call: if a bucket ends
# between them, its call-local cache drops both. Source: SGLang 0.5.14, deepseek_weight_loader.py
# (q_a with kv_a), longcat_flash.py (the same under numbered attentions) and deepseek_v4.py (wq_a
# with wkv, wkv with wgate).
_DEEPSEEK_MLA = tuple(
    (f".q_a_proj.{kind}", f".kv_a_proj_with_mqa.{kind}")
    for kind in ("weight", "weight_scale_inv", "weight_scale")
)
_DEEPSEEK_V4 = tuple(
    (f".{attention}.{first}", f".{attention}.{second}")
    for attention in ("self_attn", "attn")
    for first, second in (
        ("wq_a.weight", "wkv.weight"),
        ("wq_a.scale", "wkv.scale"),
        ("wq_a.weight_scale_inv", "wkv.weight_scale_inv"),
        ("compressor.wkv.weight", "compressor.wgate.weight"),
        ("indexer.compressor.wkv.weight", "indexer.compressor.wgate.weight"),
    )
)
FUSION_GROUPS: tuple[FusionGroup, ...] = _DEEPSEEK_MLA + _DEEPSEEK_V4


class BucketPlanner:
    """Greedy, order-preserving planner; see the module docstring for the protocol.

    A tensor of a fusion group waits until its group is whole. A group that never becomes whole
    (a DeepSeek without q_a, say) is placed by `finish`, so no tensor is ever lost.

    Args:
        bucket_bytes: limit of a bucket, in bytes; a unit larger than that gets a bucket to itself.
        fusion_groups: suffixes that must stay together.

    Raises:
        ValueError: `bucket_bytes` below 1.
    """

    def __init__(
        self, *, bucket_bytes: int, fusion_groups: tuple[FusionGroup, ...] = FUSION_GROUPS
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: expected at least 1")
        self._limit = bucket_bytes
        self._members = {
            suffix: (position, len(group))
            for position, group in enumerate(fusion_groups)
            for suffix in group
        }
        self._suffixes = tuple(self._members)
        self._waiting: dict[tuple[str, int], list[TensorSpec]] = {}
        self._open: list[Slot] = []
        self._open_bytes = 0
        self._num_closed = 0
        self._names: set[str] = set()

    def add(self, spec: TensorSpec) -> list[BucketPlan]:
        """Take the next tensor; return the buckets (none or one) that it closes.

        Raises:
            ValueError: a name came twice.
        """
        if spec.name in self._names:
            raise ValueError(f"tensor {spec.name!r} was exported twice in one sync")
        self._names.add(spec.name)
        key, size = self._find_group(spec.name)
        if key is None:
            return self._place([spec])
        unit = self._waiting.setdefault(key, [])
        unit.append(spec)
        return self._place(self._waiting.pop(key)) if len(unit) == size else []

    def finish(self) -> list[BucketPlan]:
        """Place what still waits and close the final bucket; empty only where nothing was added."""
        closed = [bucket for unit in self._waiting.values() for bucket in self._place(unit)]
        self._waiting.clear()
        if self._open:
            closed.append(self._close(last=True))
        return closed

    def _find_group(self, name: str) -> tuple[tuple[str, int] | None, int]:
        if not name.endswith(self._suffixes):
            return None, 1
        # the longest wins: `.indexer.compressor.wkv.weight` over `.compressor.wkv.weight`
        suffix = max((s for s in self._suffixes if name.endswith(s)), key=len)
        position, size = self._members[suffix]
        return (name.removesuffix(suffix), position), size

    def _place(self, unit: list[TensorSpec]) -> list[BucketPlan]:
        """Put an indivisible run of tensors into the open bucket; close a full one first."""
        unit_bytes = sum(_padded(spec.nbytes) for spec in unit)
        closed = []
        if self._open and self._open_bytes + unit_bytes > self._limit:
            closed.append(self._close(last=False))
        for spec in unit:
            self._open.append(Slot(spec, self._open_bytes))
            self._open_bytes += _padded(spec.nbytes)
        return closed

    def _close(self, *, last: bool) -> BucketPlan:
        bucket = BucketPlan(self._num_closed, tuple(self._open), self._open_bytes, last)
        self._num_closed += 1
        self._open, self._open_bytes = [], 0
        return bucket


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
