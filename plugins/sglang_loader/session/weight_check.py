"""Does what a sync has loaded fit the model, and is it all of it? Asked before it is published.

A `load_weights` drops names that it does not know, casts dtypes without a word, and does not notice
when a tensor is absent. So each TP rank rehearses it with the names, dtypes and shapes that came,
and all give one verdict:

    view = view_of_sync(layouts, models)        # on each rank by itself; takes its time
    verdict = judge_together(view, gather)      # all ranks

A verdict is remembered with its set of tensors, for as long as the engine's ranks, expert map and
quantisation stay as they are (`known_verdict`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from sglang_loader.common.layout import BucketLayout
from sglang_loader.load_plan.guard import Fingerprint
from sglang_loader.rehearsal import NotRehearsable, Spec, rehearse
from sglang_loader.rehearsal.findings import (
    RankView,
    Verdict,
    judge,
    missing_tensors,
    unscaled_tensors,
    unwritten_parameters,
    view_of,
)
from sglang_loader.rehearsal.published import Published, published_tensors
from sglang_loader.upstream import checkpoint_folder, engine_context

logger = logging.getLogger(__name__)

Gather = Callable[[Any], list[Any]]
"""Collective over the TP ranks: everybody's item, by rank."""

_known: WeakKeyDictionary[Any, tuple[Fingerprint, Verdict]] = WeakKeyDictionary()


def known_verdict(layouts: Sequence[BucketLayout], model: Any) -> Verdict | None:
    """What was said of these tensors before; None if that is not known."""
    found = _known.get(model)
    fingerprint = Fingerprint.of(layouts, engine_context(model))
    return found[1] if found is not None and found[0] == fingerprint else None


def served_checkpoint() -> Published | None:
    """The published checkpoint of this engine; None if its files tell nothing."""
    return published_tensors(checkpoint_folder())


@dataclass(frozen=True)
class SyncView:
    """What one rank says of a sync.

    Attributes:
        target: the model whose sync it is.
        fingerprint: of the sync and the engine.
        specs: the tensors that came.
        published: what is normal for the model.
        views: of its models.
        problems: why a model could not be rehearsed.
        unscaled: tensors in fp8 on one side alone.
    """

    target: Any
    fingerprint: Fingerprint
    specs: Sequence[Spec]
    published: Published | None
    views: list[RankView] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unscaled: list[str] = field(default_factory=list)


def view_of_sync(
    layouts: Sequence[BucketLayout],
    models: Sequence[Any],
    read_published: Callable[[], Published | None] = served_checkpoint,
) -> SyncView:
    """Rehearse the buckets that were loaded.

    Args:
        layouts: of the buckets.
        models: those that an update visits: one, or the draft and then the target.
        read_published: tells what is normal for the model.
    """
    started = time.perf_counter()
    target = models[-1]
    specs = [(t.name, t.dtype, t.shape) for layout in layouts for t in layout.tensors]
    fingerprint = Fingerprint.of(layouts, engine_context(target))
    seen = SyncView(target, fingerprint, specs, read_published())
    for model in models:
        try:
            if _is_quantised(model):
                seen.unscaled.extend(unscaled_tensors(specs, rehearse(model, specs)))
            _refuse_what_is_arranged(model, dict(fingerprint.context))
            seen.views.append(_view(model, specs, seen.published, is_target=model is target))
        except NotRehearsable as reason:
            seen.problems.append(str(reason))
        except Exception as error:
            logger.exception("the manifest check itself failed")
            seen.problems.append(f"the check itself failed: {error!r}")
    logger.info("%d tensors rehearsed in %.2f s", len(specs), time.perf_counter() - started)
    return seen


def judge_together(seen: SyncView, gather: Gather) -> Verdict:
    """All TP ranks' verdict on a sync; each must call this.

    Args:
        seen: this rank's view.
        gather: over the TP ranks.
    """
    everyone = gather((seen.views, seen.problems, seen.unscaled))
    obstacle = next((text for _, problems, _ in everyone for text in problems), None)
    if unscaled := list(dict.fromkeys(text for *_, texts in everyone for text in texts)):
        verdict = Verdict(mismatched=tuple(unscaled))
    elif obstacle is not None:
        verdict = Verdict(not_checked=obstacle)
    else:
        views = [view for views, *_ in everyone for view in views]
        verdict = judge(seen.specs, views, seen.published)
    _known[seen.target] = seen.fingerprint, verdict
    return verdict


def _is_quantised(model: Any) -> bool:
    """True if SGLang was told to quantise the model, or its checkpoint is."""
    return getattr(model, "quant_config", None) is not None


def _refuse_what_is_arranged(model: Any, context: dict[str, object]) -> None:
    if _is_quantised(model):
        raise NotRehearsable(
            f"a quantised model ({context['quantization']}), but for which weights are in fp8"
        )
    if context["pp_size"] != 1:
        raise NotRehearsable(f"pipeline parallel, {context['pp_size']} stages")


def _view(
    model: Any, specs: Sequence[Spec], published: Published | None, *, is_target: bool
) -> RankView:
    seen = rehearse(model, specs)
    view = view_of(specs, seen)
    if not is_target or seen.failure is not None:
        return view
    if published is None:
        surely, perhaps = unwritten_parameters(seen)
        return replace(view, missing=() if seen.errors else surely, doubtful=perhaps)
    if published.keys() <= {name for name, _, _ in specs}:
        return view
    whole = rehearse(model, list(published.values()))
    return replace(view, missing=missing_tensors(specs, seen, published, whole))
