"""Cuts a stream of tensors into buckets: pure, and the same on every rank.

A bucket is a run of tensors whose bytes fit a limit. Tensors that the engine's `load_weights`
combines within one call (a fusion group) are never cut apart. The planner sees names, shapes and
dtypes only, one at a time, because verl's trainers export weights as a generator. Every tensor
lands in exactly one bucket.
"""

from __future__ import annotations

from sglang_loader.common.layout import BucketLayout, TensorSpec

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
    """Greedy, order-preserving planner: `add` every tensor, then `finish`.

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
        self._open: list[TensorSpec] = []
        self._open_bytes = 0
        self._names: set[str] = set()

    def add(self, spec: TensorSpec) -> list[BucketLayout]:
        """Take the next tensor; return the buckets (none or one) that it closes.

        Raises:
            ValueError: a name came twice.
        """
        name, _, _ = spec
        if name in self._names:
            raise ValueError(f"tensor {name!r} was exported twice in one sync")
        self._names.add(name)
        key, size = self._find_group(name)
        if key is None:
            return self._place([spec])
        unit = self._waiting.setdefault(key, [])
        unit.append(spec)
        return self._place(self._waiting.pop(key)) if len(unit) == size else []

    def finish(self) -> list[BucketLayout]:
        """Place what still waits and close the final bucket, which is the last of those returned.

        None is returned only where nothing was added.
        """
        closed = [layout for unit in self._waiting.values() for layout in self._place(unit)]
        self._waiting.clear()
        return [*closed, self._close()] if self._open else closed

    def _find_group(self, name: str) -> tuple[tuple[str, int] | None, int]:
        if not name.endswith(self._suffixes):
            return None, 1
        # the longest wins: `.indexer.compressor.wkv.weight` over `.compressor.wkv.weight`
        suffix = max((s for s in self._suffixes if name.endswith(s)), key=len)
        position, size = self._members[suffix]
        return (name.removesuffix(suffix), position), size

    def _place(self, unit: list[TensorSpec]) -> list[BucketLayout]:
        """Put an indivisible run of tensors into the open bucket; close a full one first."""
        unit_bytes = BucketLayout.pack(unit).nbytes
        is_full = bool(self._open) and self._open_bytes + unit_bytes > self._limit
        closed = [self._close()] if is_full else []
        self._open += unit
        self._open_bytes += unit_bytes
        return closed

    def _close(self) -> BucketLayout:
        layout = BucketLayout.pack(self._open)
        self._open, self._open_bytes = [], 0
        return layout
