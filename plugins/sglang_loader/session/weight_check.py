"""Does what a sync has loaded fit the model, and is it all of it? Asked before it is published.

A `load_weights` drops names that it does not know, casts dtypes without a word, and does not notice
when a tensor is absent. So each TP rank looks at what became of the tensors that came (`uses` of
its `ModelLoader`), and all give one verdict:

    view = view_of_sync(layouts, models)        # on each rank by itself
    verdict = judge_together(view, gather)      # all ranks

A verdict is remembered with its set of tensors, for as long as the engine's ranks, expert map and
quantisation stay as they are (`known_verdict`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan import BucketUses
from sglang_loader.load_plan.destinations import collect_destinations
from sglang_loader.load_plan.guard import Fingerprint
from sglang_loader.session.findings import (
    RankView,
    Verdict,
    judge,
    missing_tensors,
    unscaled_tensors,
    view_of,
)
from sglang_loader.session.model_loader import loader_of
from sglang_loader.session.published import Published, published_tensors
from sglang_loader.upstream import engine_context, launch_arguments

logger = logging.getLogger(__name__)

Gather = Callable[[Any], list[Any]]
"""Collective over the TP ranks: everybody's item, by rank."""

_verdicts: WeakKeyDictionary[Any, tuple[Fingerprint, Verdict]] = WeakKeyDictionary()


def known_verdict(layouts: Sequence[BucketLayout], model: Any) -> Verdict | None:
    """What was said of these tensors before; None if that is not known."""
    found = _verdicts.get(model)
    fingerprint = Fingerprint.of(layouts, engine_context(model))
    return found[1] if found is not None and found[0] == fingerprint else None


def served_checkpoint() -> Published | None:
    """The published checkpoint of this engine; None if its files tell nothing."""
    return published_tensors(launch_arguments().model_path)


@dataclass(frozen=True)
class SyncView:
    """What one rank says of a sync.

    Attributes:
        unscaled: tensors in fp8 on one side alone.
    """

    target: Any
    fingerprint: Fingerprint
    published: Published | None
    views: list[RankView] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unscaled: list[str] = field(default_factory=list)


def view_of_sync(
    layouts: Sequence[BucketLayout],
    models: Sequence[Any],
    read_published: Callable[[], Published | None] = served_checkpoint,
) -> SyncView:
    """Look at the buckets that were loaded by one model, or by the draft and then the target;
    `read_published` tells what is normal for the model.
    """
    target = models[-1]
    fingerprint = Fingerprint.of(layouts, engine_context(target))
    seen = SyncView(target, fingerprint, read_published())
    for model in models:
        uses = loader_of(model).uses
        if _is_quantised(model):
            seen.unscaled.extend(unscaled_tensors(uses))
        try:
            problem = _why_unknown(model, uses, dict(fingerprint.context))
            if problem is None:
                seen.views.append(_view(model, uses, seen.published, is_target=model is target))
            else:
                seen.problems.append(problem)
        except Exception as error:
            logger.exception("the manifest check itself failed")
            seen.problems.append(f"the check itself failed: {error!r}")
    return seen


def judge_together(seen: SyncView, gather: Gather) -> Verdict:
    """All TP ranks' verdict on a sync; each must call this."""
    everyone = gather((seen.views, seen.problems, seen.unscaled))
    obstacle = next((text for _, problems, _ in everyone for text in problems), None)
    if unscaled := list(dict.fromkeys(text for *_, texts in everyone for text in texts)):
        verdict = Verdict(mismatched=tuple(unscaled))
    elif obstacle is not None:
        verdict = Verdict(not_checked=obstacle)
    else:
        views = [view for views, *_ in everyone for view in views]
        tensors = [tensor for layout in seen.fingerprint.layouts for tensor in layout.tensors]
        specs = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        verdict = judge(specs, views, seen.published)
    _verdicts[seen.target] = seen.fingerprint, verdict
    return verdict


def _is_quantised(model: Any) -> bool:
    """True if SGLang was told to quantise the model, or its checkpoint is."""
    return getattr(model, "quant_config", None) is not None


def _why_unknown(model: Any, uses: Sequence[BucketUses], context: dict[str, object]) -> str | None:
    """Why this rank cannot tell what becomes of the tensors; None if it can."""
    if _is_quantised(model):
        return f"a quantised model ({context['quantization']}), but for which weights are in fp8"
    if context["pp_size"] != 1:
        return f"pipeline parallel, {context['pp_size']} stages"
    return next((bucket.problem for bucket in uses if bucket.problem is not None), None)


def _view(
    model: Any, uses: Sequence[BucketUses], published: Published | None, *, is_target: bool
) -> RankView:
    view = view_of(uses)
    if not is_target:
        return view
    missing, doubtful = missing_tensors(uses, collect_destinations(model), published)
    return replace(view, missing=missing, doubtful=doubtful)
