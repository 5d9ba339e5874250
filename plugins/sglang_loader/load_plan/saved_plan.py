"""A load plan as bytes, to be used by a later process. Pure.

    data = encode_plan(key, plan, uses)
    saved = decode_plan(data, key)          # None if the bytes were saved under another key
    plan = saved.on(destinations)           # PlanRefused: the model has other tensors

The bytes name the model's storages. They hold no addresses and no code. The uses of the tensors
travel with the plan, because the manifest check needs them and only a trace finds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from sglang_loader.common.layout import (
    BucketLayout,
    decode_layout,
    dtype_name,
    dtype_of,
    encode_layout,
)
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.regions.intervals import Interval
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.plan import SCRATCH, BucketPlan, LoadPlan, PlanRefused
from sglang_loader.load_plan.uses import BucketUses, TensorUse

Ranges = dict[int, tuple[Interval, ...]]


class _SavedUses(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tensors: dict[str, TensorUse]
    written: dict[str, list[Interval]]
    contents: dict[str, str]


class _SavedBucket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    layout: BucketLayout
    copies: tuple[StridedCopy, ...]
    rest: BucketLayout
    written: Ranges
    live_in: Ranges
    writes: Ranges
    uses: _SavedUses


class SavedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A load plan of an earlier process.

    Attributes:
        key: all that the plan depends on, by name.
        tensors: the digest of the model's tensors and storages, see `describe`.
        storages: the names of the storages, by number.
        buckets: the plans of the buckets. Numbers of storages are positions in `storages`.
        coverage: as of `LoadPlan`.
    """

    key: dict[str, str]
    tensors: str
    storages: tuple[str, ...]
    buckets: tuple[_SavedBucket, ...]
    coverage: dict[str, tuple[Interval, ...]]

    @property
    def layouts(self) -> list[BucketLayout]:
        """The layouts of the buckets, in order."""
        return [bucket.layout for bucket in self.buckets]

    def uses(self) -> dict[int, BucketUses]:
        """Return the uses of the tensors of each bucket, by the bucket's number."""
        return {
            number: BucketUses(
                bucket.layout,
                bucket.uses.tensors,
                bucket.uses.written,
                contents=bucket.uses.contents,
            )
            for number, bucket in enumerate(self.buckets)
        }

    def on(self, destinations: Destinations) -> LoadPlan:
        """Return the plan for the storages of this process.

        Raises:
            PlanRefused: the model has other tensors or storages than when the plan was saved.
        """
        if describe(destinations) != self.tensors:
            raise PlanRefused("the model has other tensors than the saved load plan")
        numbers = {storage.name: i for i, storage in enumerate(destinations.storages)}
        new = {old: numbers[name] for old, name in enumerate(self.storages) if name in numbers}
        new[SCRATCH] = SCRATCH
        try:
            buckets = tuple(_bucket_plan(bucket, new, destinations) for bucket in self.buckets)
        except KeyError as error:
            raise PlanRefused("the saved load plan writes to an unknown storage") from error
        return LoadPlan(buckets=buckets, coverage=self.coverage, destinations=destinations)


def describe(destinations: Destinations) -> str:
    """Return a digest of a model's tensors and their storages, without the addresses."""
    storages = destinations.storages
    tensors = [
        (
            *(t.name, t.kind, storages[t.storage].name, str(t.dtype)),
            *(t.region.offset, t.region.shape, t.region.stride),
        )
        for t in destinations.tensors
    ]
    reached = [storages[i] for i in sorted({t.storage for t in destinations.tensors})]
    sizes = [(s.name, s.nbytes, s.device.type) for s in reached]
    return hashlib.sha256(repr((tensors, sizes)).encode()).hexdigest()


def encode_plan(key: Mapping[str, str], plan: LoadPlan, uses: Sequence[BucketUses]) -> bytes:
    """Encode a plan.

    Args:
        uses: the uses of the tensors of each bucket.
    """
    saved = SavedPlan(
        dict(key),
        describe(plan.destinations),
        tuple(storage.name for storage in plan.destinations.storages),
        tuple(_saved_bucket(*pair) for pair in zip(plan.buckets, uses, strict=True)),
        dict(plan.coverage),
    )
    return _encoder.encode(saved)


def decode_plan(data: bytes, key: Mapping[str, str]) -> SavedPlan | None:
    """Decode a plan, or return None if the plan was saved under another key.

    Raises:
        ValueError: the bytes are no plan.
    """
    saved = _decoder.decode(data)  # msgspec's errors are ValueErrors
    if saved.key != key:
        return None
    # Each sync compares these layouts with those of its messages. Of 18,867 tensors that takes some
    # milliseconds, unless they are the same objects.
    return replace(saved, buckets=tuple(map(_with_shared_layout, saved.buckets)))


_encoder = msgspec.msgpack.Encoder(enc_hook=dtype_name)
# The hook also gets the two dtypes of `Unit.cast`, which are plain objects there.
_decoder = msgspec.msgpack.Decoder(SavedPlan, dec_hook=dtype_of)


def _with_shared_layout(bucket: _SavedBucket) -> _SavedBucket:
    """Return the bucket with the layout object that messages about this bucket decode to."""
    return replace(bucket, layout=decode_layout(encode_layout(bucket.layout)))


def _saved_bucket(bucket: BucketPlan, uses: BucketUses) -> _SavedBucket:
    # The plan is joined already. Only `join_buckets` reads the fields that are left out.
    return _SavedBucket(
        bucket.layout,
        bucket.copies,
        bucket.rest,
        dict(bucket.written),
        dict(bucket.live_in),
        dict(bucket.writes),
        _SavedUses(
            dict(uses.tensors),
            {name: list(ranges) for name, ranges in uses.written.items()},
            dict(uses.contents),
        ),
    )


def _bucket_plan(
    saved: _SavedBucket, new: Mapping[int, int], destinations: Destinations
) -> BucketPlan:
    """Return a bucket's plan with the numbers of this process's storages.

    Raises:
        KeyError: a storage has no number.
        PlanRefused: a copy leaves its bucket or its storage.
    """
    copies = []
    for copy in saved.copies:
        copy = replace(copy, storage=new[copy.storage])
        nbytes = saved.rest.nbytes
        if copy.storage != SCRATCH:
            nbytes = destinations.storages[copy.storage].nbytes
        (_, src_stop), (_, dst_stop) = copy.src_bounds(), copy.dst_bounds()
        if src_stop > saved.layout.nbytes or dst_stop > nbytes or min(copy.src, copy.dst) < 0:
            raise PlanRefused("a copy of the saved load plan leaves its bucket or its storage")
        copies.append(copy)
    return BucketPlan(
        layout=saved.layout,
        copies=tuple(copies),
        rest=saved.rest,
        written={new[storage]: ranges for storage, ranges in saved.written.items()},
        live_in={new[storage]: ranges for storage, ranges in saved.live_in.items()},
        writes={new[storage]: ranges for storage, ranges in saved.writes.items()},
        left_out=(),
        recomputed=frozenset(),
        host_reads=(),
    )
