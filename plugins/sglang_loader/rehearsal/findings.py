"""From rehearsals to findings: what of a sync's tensors does not fit the model. Pure.

A rank of a tensor-parallel engine reads its part of a tensor, an expert-parallel one its experts
alone. So each rank makes a `RankView` of its own rehearsal, and `judge` puts all of them together:
a tensor is dropped if no rank uses it, and its bytes are read if any rank reads them.

What is normal for a model is learned from its published checkpoint: a tensor that stands there in
the same shape is never unexpected, and only what that checkpoint would write can be missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sglang_loader.common.geometry import Region, region_runs
from sglang_loader.common.intervals import Interval, contains, intersects, merge_runs, subtract
from sglang_loader.load_plan.destinations import TensorEntry
from sglang_loader.rehearsal.published import Published
from sglang_loader.rehearsal.recorder import Use
from sglang_loader.rehearsal.rehearse import Refusal, Rehearsal, region_of
from sglang_loader.rehearsal.sources import Spec

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
        errors: what `load_weights` raised, by tensor.
        failure: what it raised at no tensor in particular.
        idle: tensors that this rank makes nothing of.
        partial: of the others, what was read, where that is not all.
        clashes: tensors of another kind of number than their destination, with the reason.
        missing: what nothing in the sync writes on this rank.
        doubtful: parameters that are not written, where it is unknown whether they should be.
    """

    errors: Mapping[str, Refusal] = field(default_factory=dict)
    failure: str | None = None
    idle: frozenset[str] = frozenset()
    partial: Mapping[str, frozenset[Region]] = field(default_factory=dict)
    clashes: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()


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
        parts = [
            f"{len(found)} {kind}: {_listed(found)}"
            for kind, found in (
                ("mismatched", self.mismatched),
                ("missing", self.missing),
                ("unexpected", self.unexpected),
            )
            if found
        ]
        return "; ".join(parts)

    def remark(self) -> str:
        """What a user should know though it is no error, in one line; "": nothing."""
        parts = [
            f"not checked: {self.not_checked}" if self.not_checked is not None else "",
            "" if self.fits else f"the weights do not fit the engine's model: {self.text()}",
            f"not sent, or not used: {_listed(self.doubtful)}" if self.doubtful else "",
        ]
        return " ".join("; ".join(filter(None, parts)).split())


def view_of(specs: Sequence[Spec], seen: Rehearsal) -> RankView:
    """One rank's view, but for what is missing."""
    untouched = Use()
    uses = {name: seen.uses.get(name, untouched) for name, _, _ in specs}
    loaded = [spec for spec in specs if spec[0] not in seen.errors and _nbytes(spec)]
    idle = frozenset(name for name, _, _ in loaded if not uses[name].is_applied)
    partial, clashes = {}, {}
    for name, dtype, _ in loaded:
        use = uses[name]
        if name not in idle and use.parts and None not in use.parts:
            partial[name] = frozenset(part for part in use.parts if part is not None)
        if clash := _clash(dtype, use, _may_become):
            clashes[name] = clash
        elif use.is_broadcast:
            clashes[name] = "smaller than what it would fill"
    return RankView(
        errors=seen.errors, failure=seen.failure, idle=idle, partial=partial, clashes=clashes
    )


def missing_tensors(
    specs: Sequence[Spec], seen: Rehearsal, published: Published, whole: Rehearsal
) -> tuple[str, ...]:
    """Tensors of the published checkpoint that were not sent and leave a gap.

    Args:
        specs: what was sent.
        seen: its rehearsal.
        published: the checkpoint.
        whole: the rehearsal of that checkpoint.
    """
    sent = {name for name, _, _ in specs}
    gaps = {
        storage: subtract(ranges, seen.written.get(storage, ()))
        for storage, ranges in whole.written.items()
    }
    return tuple(
        name
        for name in published
        if name not in sent and name in whole.uses and _meets(whole.uses[name], gaps)
    )


def unwritten_parameters(seen: Rehearsal) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(surely missing, perhaps missing): parameters that are not written in full.

    Without a published checkpoint, what counts is whether the same parameter of another layer or
    expert is written.
    """
    written: dict[str, bool] = {
        tensor.name: _is_written(tensor, seen.written.get(tensor.storage, ()))
        for tensor in seen.destinations.tensors
        if tensor.kind == "parameter"
    }
    in_other_layers = {_pattern(name) for name, is_written in written.items() if is_written}
    gaps = [name for name, is_written in written.items() if not is_written]
    surely = tuple(f"{name} (engine)" for name in gaps if _pattern(name) in in_other_layers)
    perhaps = tuple(f"{name} (engine)" for name in gaps if _pattern(name) not in in_other_layers)
    return surely, perhaps


def unscaled_tensors(specs: Sequence[Spec], seen: Rehearsal) -> tuple[str, ...]:
    """Tensors in fp8 on one side alone: a cast takes the number for the value, or loses its scale.

    The one thing that can be told of a quantised model, whatever its loader arranges.
    """
    clashes = (
        (spec, _clash(spec[1], seen.uses.get(spec[0], Use()), _both_scaled)) for spec in specs
    )
    return tuple(_described(spec, clash, None) for spec, clash in clashes if clash)


def judge(specs: Sequence[Spec], views: Sequence[RankView], published: Published | None) -> Verdict:
    """All ranks' views as one verdict; the same on every rank."""
    normal = {spec[0] for spec in specs if published and _is_normal(spec, published)}
    embeddings = {shape for name, _, shape in specs if name.endswith(_EMBEDDING)}
    failure = next((view.failure for view in views if view.failure), None)
    mismatched = [f"all tensors ({failure})"] if failure else []
    unexpected: list[str] = []
    doubtful: list[str] = []
    for spec in specs:
        name, _, shape = spec
        known = published.get(name) if published is not None else None
        refusal = next((view.errors[name] for view in views if name in view.errors), None)
        if refusal is not None and refusal.is_unknown and known is None:
            unexpected.append(f"{name} ({refusal.text})")
        elif refusal is not None:
            if name not in normal or normal.issuperset(refusal.together):
                mismatched.append(_described(spec, refusal.text, known))
        elif all(name in view.idle for view in views):
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


def _is_normal(spec: Spec, published: Published) -> bool:
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


def _clash(
    dtype: torch.dtype, use: Use, agree: Callable[[torch.dtype, torch.dtype], bool]
) -> str | None:
    """The first destination of a tensor with which its dtype does not agree, in words."""
    clash = next((target for target in use.dtypes if not agree(dtype, target)), None)
    return None if clash is None else f"{_short(dtype)}, the engine has {_short(clash)}"


def _unread_bytes(spec: Spec, views: Sequence[RankView]) -> int:
    """A lower bound: parts that overlap count twice."""
    users = [view for view in views if spec[0] not in view.idle]
    if not all(spec[0] in view.partial for view in users):
        return 0  # some rank reads all of it
    parts = {part for view in users for part in view.partial[spec[0]]}
    return max(0, _nbytes(spec) - sum(math.prod(p.shape) * p.itemsize for p in parts))


def _described(spec: Spec, reason: str, known: Spec | None) -> str:
    name, _, shape = spec
    differs = known is not None and known[2] != shape
    instead = f"; published: {list(known[2])}" if known is not None and differs else ""
    return f"{name} {list(shape)} ({reason}{instead})"


def _meets(use: Use, gaps: Mapping[int, Sequence[Interval]]) -> bool:
    return any(
        intersects(gaps[storage], run)
        for storage, region in use.targets
        if gaps.get(storage)
        for run in merge_runs([region_runs(region)])
    )


def _is_written(tensor: TensorEntry, written: Sequence[Interval]) -> bool:
    region = region_of(tensor)
    if contains(written, region.bounds()):
        return True
    return all(contains(written, run) for run in merge_runs([region_runs(region)]))


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
