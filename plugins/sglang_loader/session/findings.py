"""From what `load_weights` made of a sync's tensors to what does not fit the model. Pure.

A rank of a tensor-parallel engine reads its part of a tensor, an expert-parallel one its experts
alone. So each rank makes a `RankView` of its own loads, and `judge` puts all of them together: a
tensor is dropped if no rank uses it, and its bytes are read if any rank reads them.

What is normal for a model is learned from its published checkpoint: a tensor that stands there in
the same shape is never unexpected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sglang_loader.common.layout import BucketTensor
from sglang_loader.common.regions.geometry import Region
from sglang_loader.common.regions.intervals import merge
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.uses import BucketUses, TensorUse

Spec = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, dtype, shape)."""

PublishedTensors = Mapping[str, Spec]
"""The tensors of a published checkpoint, by name."""

_TIED_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_SCALED = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
"""Weights in these are numbers of which the value is elsewhere: in their scale."""
MAX_NAMED = 20
_ROTARY = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass(frozen=True)
class RankView:
    """What one rank says of a sync's tensors.

    Attributes:
        unused: tensors that this rank makes nothing of.
        partial: of the others, what was read, where that is not all.
        clashes: tensors of another kind of number than their destination, with the reason; where
            this rank cannot tell more, of those alone that are in fp8 on one side.
        missing: what nothing in the sync writes on this rank.
        doubtful: parameters that are not written, where it is unknown whether they should be.
        unknown: why this rank cannot tell all that; None: it can.
    """

    unused: frozenset[str] = frozenset()
    partial: Mapping[str, frozenset[Region]] = field(default_factory=dict)
    clashes: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    unknown: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What of a sync's tensors does not fit the model.

    Attributes:
        not_checked: why the check means nothing; None if it does.
        unexpected: tensors that the model drops, or does not know.
        mismatched: tensors whose shape or dtype it cannot take, each with the reason.
        missing: weights that nothing in the sync writes.
        doubtful: not errors: what cannot be told without the names of a published checkpoint.
    """

    not_checked: str | None = None
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Nothing speaks against these tensors."""
        return not (self.unexpected or self.mismatched or self.missing)

    def text(self) -> str:
        """What does not fit, in words, long lists cut short."""
        kinds = {
            "mismatched": self.mismatched,
            "missing": self.missing,
            "unexpected": self.unexpected,
        }
        return "; ".join(
            f"{len(found)} {kind}: {_listed(found)}" for kind, found in kinds.items() if found
        )

    def remark(self) -> str:
        """What a user should know though it is no error, in one line; "": nothing."""
        parts = [
            f"not checked: {self.not_checked}" if self.not_checked is not None else "",
            "" if self.fits else f"the weights do not fit the engine's model: {self.text()}",
            f"not sent, or not used: {_listed(self.doubtful)}" if self.doubtful else "",
        ]
        return " ".join("; ".join(filter(None, parts)).split())


def _may_become(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast keeps the meaning: floats become floats, but 8-bit ones have a scale."""
    if source == target:
        return True
    if "float8" in str(source) or "float4" in str(source):
        return False
    if source.is_complex or target.is_complex:
        return source.is_complex and target.is_complex
    return source.is_floating_point == target.is_floating_point


def _both_scaled(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether both, or neither, are numbers that mean nothing without a scale."""
    return (source in _SCALED) == (target in _SCALED)


def view_of(uses: Sequence[BucketUses]) -> RankView:
    """One rank's view, but for what is missing."""
    partial, clashes = {}, {}
    for tensor, use in _used(uses):
        if use.is_applied and use.parts and None not in use.parts:
            partial[tensor.name] = frozenset(part for part in use.parts if part is not None)
        if use.is_broadcast:
            clashes[tensor.name] = "smaller than what it would fill"
    unused = frozenset(name for bucket in uses for name in bucket.unused)
    return RankView(unused=unused, partial=partial, clashes={**clashes, **clashes_of(uses)})


def clashes_of(
    uses: Sequence[BucketUses], agree: Callable[[torch.dtype, torch.dtype], bool] = _may_become
) -> dict[str, str]:
    """Tensors whose dtype does not agree with one that their data went to, in words."""
    return {
        tensor.name: f"{_short(tensor.dtype)}, the engine has {_short(target)}"
        for tensor, use in _used(uses)
        for target in use.dtypes
        if not agree(tensor.dtype, target)
    }


def view_of_quantised(uses: Sequence[BucketUses], unknown: str) -> RankView:
    """Of a quantised model, whose loader may arrange anything: a cast between fp8 and others takes
    the number for the value, or loses its scale.
    """
    return RankView(unknown=unknown, clashes=clashes_of(uses, _both_scaled))


def _used(uses: Sequence[BucketUses]) -> Iterator[tuple[BucketTensor, TensorUse]]:
    """The tensors with bytes that were read, and what became of them."""
    for bucket in uses:
        for tensor in bucket.layout.tensors:
            if tensor.nbytes and (use := bucket.tensors.get(tensor.name)) is not None:
                yield tensor, use


def missing_tensors(
    uses: Sequence[BucketUses], destinations: Destinations, published: PublishedTensors | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(surely missing, perhaps missing): what would have filled the parameters that the sync has
    not written in full.

    These are the tensors of the published checkpoint that were not sent and belong to the same
    module. Where it names none, or there is none, the parameters themselves are named, and what
    counts is whether the same parameter of another layer or expert is written.
    """
    unsent: list[str] = []
    if published is not None:
        sent = {tensor.name for bucket in uses for tensor in bucket.layout.tensors}
        unsent = [name for name in published if name not in sent]
        if not unsent:
            return (), ()
    written = _written(uses, destinations)
    gaps = [name for name, is_written in written.items() if not is_written]
    modules = {_module(name) for name in gaps}
    if named := tuple(name for name in unsent if not modules.isdisjoint(_modules_above(name))):
        return named, ()
    in_other_layers = {_pattern(name) for name, is_written in written.items() if is_written}
    surely = tuple(f"{name} (engine)" for name in gaps if _pattern(name) in in_other_layers)
    perhaps = tuple(f"{name} (engine)" for name in gaps if _pattern(name) not in in_other_layers)
    return surely, perhaps


def _written(uses: Sequence[BucketUses], destinations: Destinations) -> dict[str, bool]:
    """By parameter whether the sync has written all of it."""
    written = {
        storage.name: merge(
            interval for bucket in uses for interval in bucket.written.get(storage.name, ())
        )
        for storage in destinations.storages
    }
    return {
        tensor.name: tensor.lies_in(written[destinations.storages[tensor.storage].name])
        for tensor in destinations.tensors
        if tensor.kind == "parameter"
    }


def _module(parameter: str) -> str:
    """The module whose tensors an engine may have fused into a parameter: the layer's block that it
    lies in (`layers.3.self_attn` for `model.layers.3.self_attn.qkv_proj.weight`), or its own
    outside of layers. From the layer's number on, because prefixes differ from a checkpoint's.
    """
    parts = _from_layer(parameter)
    return ".".join(
        parts[: max(3, len(parts) - 2)] if parts[1:2] and parts[1].isdigit() else parts[:-1]
    )


def _modules_above(name: str) -> set[str]:
    parts = _from_layer(name)
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


def _from_layer(name: str) -> list[str]:
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return parts[-2:] if number is None else parts[max(0, number - 1) :]


def judge(
    specs: Sequence[Spec], views: Sequence[RankView], published: PublishedTensors | None
) -> Verdict:
    """All ranks' views as one verdict; the same on every rank."""
    if blind := [view for view in views if view.unknown is not None]:
        clashes = {name: reason for view in blind for name, reason in view.clashes.items()}
        unscaled = (_described(s, clashes[s[0]], None) for s in specs if s[0] in clashes)
        return Verdict(
            not_checked=blind[0].unknown if not clashes else None, mismatched=tuple(unscaled)
        )
    normal = {spec[0] for spec in specs if published and _is_normal(spec, published)}
    embeddings = {shape for name, _, shape in specs if name.endswith(_EMBEDDING)}
    mismatched: list[str] = []
    unexpected: list[str] = []
    doubtful: list[str] = []
    for spec in specs:
        name, _, shape = spec
        known = published.get(name) if published is not None else None
        if all(name in view.unused for view in views):
            if known is None and not _may_be_dropped(name, shape, embeddings):
                (doubtful if published is None else unexpected).append(name)
            elif known is not None and name not in normal:
                mismatched.append(_described(spec, "not used like this", known))
        elif name not in normal and (reason := _mismatch(spec, views, known)):
            mismatched.append(_described(spec, reason, known))
    return Verdict(
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        missing=_union(view.missing for view in views),
        doubtful=(*doubtful, *_union(view.doubtful for view in views)),
    )


def _is_normal(spec: Spec, published: PublishedTensors) -> bool:
    known = published.get(spec[0])
    return known is not None and known[2] == spec[2] and _may_become(spec[1], known[1])


def _mismatch(spec: Spec, views: Sequence[RankView], known: Spec | None) -> str | None:
    """What is wrong with a tensor that `load_weights` took without a word."""
    name = spec[0]
    clash = next((view.clashes[name] for view in views if name in view.clashes), None)
    if clash is not None:
        return clash
    if unread := _unread_bytes(spec, views):
        return f"{unread} of {_nbytes(spec)} bytes are read by no rank"
    if known is not None and math.prod(known[2]) != math.prod(spec[2]):
        return f"{math.prod(spec[2])} elements"
    return None


def _may_be_dropped(name: str, shape: tuple[int, ...], embeddings: set[tuple[int, ...]]) -> bool:
    """An output layer tied to the embedding comes under both names; rotary tables are computed."""
    return name.endswith(_ROTARY) or (name.endswith(_TIED_HEAD) and shape in embeddings)


def _unread_bytes(spec: Spec, views: Sequence[RankView]) -> int:
    """A lower bound: parts that overlap count twice."""
    users = [view for view in views if spec[0] not in view.unused]
    if not all(spec[0] in view.partial for view in users):
        return 0  # some rank reads all of it
    parts = {part for view in users for part in view.partial[spec[0]]}
    return max(0, _nbytes(spec) - sum(math.prod(p.shape) * p.itemsize for p in parts))


def _described(spec: Spec, reason: str, known: Spec | None) -> str:
    name, _, shape = spec
    differs = known is not None and known[2] != shape
    instead = f"; published: {list(known[2])}" if known is not None and differs else ""
    return f"{name} {list(shape)} ({reason}{instead})"


def _listed(found: Sequence[str]) -> str:
    more = f", and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _nbytes(spec: Spec) -> int:
    return math.prod(spec[2]) * spec[1].itemsize


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))
