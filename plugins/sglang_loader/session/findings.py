"""Search for tensors of a sync that do not fit the engine's model. Pure.

The evidence is the use that `load_weights` made of each tensor. A tensor-parallel rank reads its
part of a tensor, an expert-parallel rank reads its experts alone. Each rank therefore makes a
`RankView` of its own loads, and `judge` combines the views. A tensor is unexpected if no rank uses
the tensor. A byte counts as read if any rank reads the byte.

The model's published checkpoint shows which tensors are normal. If the checkpoint has a tensor in
the same shape, the tensor is unexpected only under two conditions: no rank uses the tensor, and a
parameter of the tensor's module stays unwritten.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sglang_loader.common.layout import BucketTensor
from sglang_loader.common.naming import listed
from sglang_loader.common.regions.geometry import Region
from sglang_loader.common.regions.intervals import merge
from sglang_loader.load_plan.destinations import Destinations
from sglang_loader.load_plan.uses import BucketUses, TensorUse, merged_contents, tied_tensors

PublishedTensors = Mapping[str, BucketTensor]
"""The tensors of a published checkpoint, by name. Their offsets are unused."""

_TIED_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_SCALED = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
"""Dtypes of weights that are stored with a separate scale."""
_ROTARY = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass(frozen=True)
class RankView:
    """The fit of a sync's tensors on one rank.

    Attributes:
        unused: tensors that do not change the model on this rank.
        partial: for each tensor that was read in part, the regions that were read.
        clashes: for each tensor whose kind of number or size differs from its destination's, the
            reason. If `unknown` is set, only clashes between fp8 and another dtype are listed.
        missing: weights that nothing in the sync writes on this rank.
        doubtful: unwritten parameters that may or may not need a tensor.
        unknown: the reason why this rank could not check the tensors, or None.
        contents: see `BucketUses`, of all buckets.
    """

    unused: frozenset[str] = frozenset()
    partial: Mapping[str, frozenset[Region]] = field(default_factory=dict)
    clashes: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    unknown: str | None = None
    contents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The tensors of a sync that do not fit the model, on all ranks together.

    Attributes:
        not_checked: the reason why nothing could be checked, or None.
        unexpected: tensors that the model drops, or has no parameter for.
        mismatched: tensors whose shape or dtype the model cannot take, each with the reason.
        missing: weights that nothing in the sync writes.
        doubtful: weights that may be missing or unexpected. Only a published checkpoint could
            decide.
        tied: tensors that the model drops because their bytes equal those of another, each with
            the name of the other. The verdict holds as long as they are equal.
    """

    not_checked: str | None = None
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """True if no tensor is unexpected, mismatched or missing."""
        return not (self.unexpected or self.mismatched or self.missing)

    def text(self) -> str:
        """Return the tensors that do not fit, as text. Long lists are cut short."""
        kinds = {
            "mismatched": self.mismatched,
            "missing": self.missing,
            "unexpected": self.unexpected,
        }
        return ". ".join(
            f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names
        )

    def remark(self) -> str:
        """Return one line for the user about a sync that is not refused, or "" if all is well."""
        parts = [
            f"not checked: {self.not_checked}" if self.not_checked is not None else "",
            "" if self.fits else f"the weights do not fit the engine's model: {self.text()}",
            f"not sent, or not used: {listed(self.doubtful)}" if self.doubtful else "",
        ]
        return " ".join(". ".join(filter(None, parts)).split())


def _keeps_value(source: torch.dtype, target: torch.dtype) -> bool:
    if source == target:
        return True
    if "float8" in str(source) or "float4" in str(source):
        return False  # the value also depends on a scale
    if source.is_complex or target.is_complex:
        return source.is_complex and target.is_complex
    return source.is_floating_point == target.is_floating_point


def _both_or_neither_scaled(source: torch.dtype, target: torch.dtype) -> bool:
    return (source in _SCALED) == (target in _SCALED)


def view_of(uses: Sequence[BucketUses]) -> RankView:
    """Build one rank's view, without `missing` and `doubtful`."""
    partial, clashes = {}, {}
    for tensor, use in _used(uses):
        if use.is_applied and use.parts and None not in use.parts:
            partial[tensor.name] = frozenset(part for part in use.parts if part is not None)
        if use.is_broadcast:
            clashes[tensor.name] = "smaller than what it would fill"
    unused = frozenset(name for bucket in uses for name in bucket.unused)
    clashes |= clashes_of(uses)
    return RankView(unused=unused, partial=partial, clashes=clashes, contents=merged_contents(uses))


def clashes_of(
    uses: Sequence[BucketUses], agree: Callable[[torch.dtype, torch.dtype], bool] = _keeps_value
) -> dict[str, str]:
    """Find the tensors whose dtype does not `agree` with a destination's dtype.

    Returns:
        By tensor name, the two dtypes as text.
    """
    return {
        tensor.name: f"{_short(tensor.dtype)}, the engine has {_short(target)}"
        for tensor, use in _used(uses)
        for target in use.dtypes
        if not agree(tensor.dtype, target)
    }


def view_of_quantised(uses: Sequence[BucketUses], unknown: str) -> RankView:
    """Build the view of a quantised model: only clashes between fp8 and another dtype are found."""
    # The loader may convert tensors as it likes. But a plain cast to or from fp8 ignores the scale.
    return RankView(unknown=unknown, clashes=clashes_of(uses, _both_or_neither_scaled))


def _used(uses: Sequence[BucketUses]) -> Iterator[tuple[BucketTensor, TensorUse]]:
    """Yield each tensor of which bytes were read, with its use."""
    for bucket in uses:
        for tensor in bucket.layout.tensors:
            if tensor.nbytes and (use := bucket.tensors.get(tensor.name)) is not None:
                yield tensor, use


def missing_tensors(
    uses: Sequence[BucketUses],
    destinations: Destinations,
    published: PublishedTensors | None,
    *,
    starts_random: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Find the weights that are missing from a sync, if the sync left parameters unwritten.

    A missing weight is a tensor of the published checkpoint that was not sent and belongs to the
    module of an unwritten parameter. If there is no such tensor, the unwritten parameters
    themselves are named. Such a parameter is surely missing if the sync wrote the same parameter of
    another layer or expert.

    Args:
        starts_random: the engine was launched with random weights. An unwritten parameter is then
            surely missing, unless the sync brought the whole published checkpoint. In that case the
            parameter is perhaps missing.

    Returns:
        The weights that are surely missing, and the weights that are perhaps missing.
    """
    unsent: list[str] = []
    if published is not None:
        sent = {tensor.name for bucket in uses for tensor in bucket.layout.tensors}
        unsent = [name for name in published if name not in sent]
        if not unsent and not starts_random:
            return (), ()
    # A gap is a parameter of the engine's model that the sync has not written as a whole.
    written = _written(uses, destinations)
    gaps = [name for name, is_written in written.items() if not is_written]
    if starts_random and published is not None and not unsent:
        # `load_weights` writes none of these from the published checkpoint either.
        return (), tuple(f"{name} (engine)" for name in gaps)
    # The engine may have fused the missing tensor, so that its own name is not a parameter's.
    modules = {_module(name) for name in gaps}
    if named := tuple(name for name in unsent if not modules.isdisjoint(_modules_above(name))):
        return named, ()
    if starts_random:
        return tuple(f"{name} (engine)" for name in gaps), ()
    # A parameter that the sync writes in other layers, but not in this one, is surely missing.
    in_other_layers = {_pattern(name) for name, is_written in written.items() if is_written}
    surely = tuple(f"{name} (engine)" for name in gaps if _pattern(name) in in_other_layers)
    perhaps = tuple(f"{name} (engine)" for name in gaps if _pattern(name) not in in_other_layers)
    return surely, perhaps


def _written(uses: Sequence[BucketUses], destinations: Destinations) -> dict[str, bool]:
    """Return for each parameter, by name, True if the sync has written all of its bytes."""
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
    """Return the module whose tensors an engine may have fused into a parameter."""
    # In a layer: the layer's block, `layers.3.self_attn` for
    # `model.layers.3.self_attn.qkv_proj.weight`. Elsewhere: the parameter's own module.
    parts = _from_layer(parameter)
    return ".".join(
        parts[: max(3, len(parts) - 2)] if parts[1:2] and parts[1].isdigit() else parts[:-1]
    )


def _modules_above(name: str) -> set[str]:
    parts = _from_layer(name)
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


def _from_layer(name: str) -> list[str]:
    """Split a name at its dots. Return the parts from the layer on, else the last two."""
    # An engine's prefixes differ from a checkpoint's.
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return parts[-2:] if number is None else parts[max(0, number - 1) :]


def judge(
    tensors: Sequence[BucketTensor], views: Sequence[RankView], published: PublishedTensors | None
) -> Verdict:
    """Combine the views of all ranks into one verdict, the same on every rank."""
    # If one rank could not check the tensors, only clashes that some rank is sure of count.
    if blind := [view for view in views if view.unknown is not None]:
        clashes = {name: reason for view in blind for name, reason in view.clashes.items()}
        unscaled = (_described(t, clashes[t.name], None) for t in tensors if t.name in clashes)
        return Verdict(
            not_checked=blind[0].unknown if not clashes else None, mismatched=tuple(unscaled)
        )
    contents = {name: content for view in views for name, content in view.contents.items()}
    unused = frozenset.intersection(*(view.unused for view in views))  # on all ranks
    tied = tied_tensors(contents, unused)
    untied = _untied_heads(tensors, contents, unused, tied)
    may_be_dropped = {*tied, *_droppable(tensors, contents)}
    mismatched: list[str] = []
    unexpected: list[str] = []
    dropped: list[str] = []  # though the published checkpoint has them
    for tensor in tensors:
        name = tensor.name
        expected = published.get(name) if published is not None else None
        is_normal = expected is not None and _is_normal(tensor, expected)
        # A tensor that no rank uses, and that has no reason to be dropped, is unexpected.
        if name in unused:
            if name not in may_be_dropped:
                is_unexpected = expected is None or name in untied
                (unexpected if is_unexpected else dropped).append(name)
            if expected is not None and not is_normal:
                mismatched.append(_described(tensor, "not used like this", expected))
        elif not is_normal and (reason := _mismatch(tensor, views, expected)):
            mismatched.append(_described(tensor, reason, expected))
    missing = _union(view.missing for view in views)
    gaps = _union(view.doubtful for view in views)
    # A model may drop some tensors of its checkpoint. But a dropped tensor beside a parameter that
    # nothing has written is most likely that parameter's, under a name that the loader lacks.
    if unexpected and published is None and not (missing or gaps):
        return Verdict(mismatched=tuple(mismatched), doubtful=tuple(unexpected), tied=tied)
    if unexpected:
        missing, gaps = (*missing, *gaps), ()
    elif beside := _in_modules_of(gaps, dropped):
        unexpected = [name for name in dropped if _in_modules_of(beside, [name])]
        missing, gaps = (*missing, *beside), tuple(gap for gap in gaps if gap not in beside)
    return Verdict(
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        missing=missing,
        doubtful=gaps,
        tied=tied,
    )


def _in_modules_of(parameters: Iterable[str], tensors: Iterable[str]) -> tuple[str, ...]:
    """Return the parameters whose module contains one of the tensors."""
    modules = {module for name in tensors for module in _modules_above(name)}
    return tuple(name for name in parameters if _module(name) in modules)


def _is_normal(tensor: BucketTensor, expected: BucketTensor) -> bool:
    return expected.shape == tensor.shape and _keeps_value(tensor.dtype, expected.dtype)


def _mismatch(
    tensor: BucketTensor, views: Sequence[RankView], expected: BucketTensor | None
) -> str | None:
    """Return the reason why a tensor that `load_weights` accepted does not fit, or None."""
    clash = next((view.clashes[tensor.name] for view in views if tensor.name in view.clashes), None)
    if clash is not None:
        return clash
    if unread := _unread_bytes(tensor, views):
        return f"{unread} of {tensor.nbytes} bytes are read by no rank"
    if expected is not None and math.prod(expected.shape) != math.prod(tensor.shape):
        return f"{math.prod(tensor.shape)} elements"
    return None


def _untied_heads(
    tensors: Sequence[BucketTensor],
    contents: Mapping[str, str],
    unused: Collection[str],
    tied: Collection[str],
) -> set[str]:
    """Return the output layers that differ from an embedding which the model uses in their place.

    A published checkpoint may have a head that the model drops. Such a head equals the embedding.
    """
    known = [tensor for tensor in tensors if tensor.name in contents]
    used_shapes = {tensor.shape for tensor in known if tensor.name not in unused}
    dropped = {t.name for t in known if t.name in unused and t.shape in used_shapes}
    return {name for name in dropped if name.endswith(_TIED_HEAD) and name not in tied}


def _droppable(tensors: Sequence[BucketTensor], contents: Mapping[str, str]) -> set[str]:
    """Return the names of tensors that a model may drop, whatever their bytes are.

    These are rotary tables, and output layers whose bytes are not known, or not those of a tensor
    of the same shape. Such an output layer is tied to an embedding if it has the usual name and an
    embedding's shape.
    """
    shapes = {tensor.shape for tensor in tensors if tensor.name.endswith(_EMBEDDING)}
    unknown = {tensor.shape for tensor in tensors if tensor.name not in contents}
    droppable: set[str] = set()
    for tensor in tensors:
        is_head = tensor.name.endswith(_TIED_HEAD) and tensor.shape in shapes
        is_tied = is_head and tensor.shape in unknown
        # An engine computes rotary tables itself.
        if is_tied or tensor.name.endswith(_ROTARY):
            droppable.add(tensor.name)
    return droppable


def _unread_bytes(tensor: BucketTensor, views: Sequence[RankView]) -> int:
    """Return a lower bound of the number of bytes that no rank reads."""
    users = [view for view in views if tensor.name not in view.unused]
    if not all(tensor.name in view.partial for view in users):
        return 0  # some rank reads all of it
    parts = {part for view in users for part in view.partial[tensor.name]}
    # Parts may overlap: then the sum counts bytes twice.
    return max(0, tensor.nbytes - sum(math.prod(p.shape) * p.itemsize for p in parts))


def _described(tensor: BucketTensor, reason: str, expected: BucketTensor | None) -> str:
    if expected is not None and expected.shape != tensor.shape:
        reason += f", published: {list(expected.shape)}"
    return f"{tensor.name} {list(tensor.shape)} ({reason})"


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))
