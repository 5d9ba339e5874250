"""Buckets of a known list of tensors."""

from collections.abc import Iterable, Iterator

from sglang_loader.common.layout import BucketLayout, TensorSpec
from verl_sglang_sync.sources.bucket_stream import FUSION_GROUPS, BucketPlanner, FusionGroup


def plan_buckets(
    specs: Iterable[TensorSpec],
    *,
    bucket_bytes: int,
    fusion_groups: tuple[FusionGroup, ...] = FUSION_GROUPS,
) -> list[BucketLayout]:
    """Plan a whole sync; arguments and errors as for `BucketPlanner`."""

    def buckets() -> Iterator[BucketLayout]:
        planner = BucketPlanner(bucket_bytes=bucket_bytes, fusion_groups=fusion_groups)
        for spec in specs:
            yield from planner.add(spec)
        yield from planner.finish()

    return list(buckets())
