"""The engine's part of the manifest check: every TP rank rehearses, all give one answer.

The trainer posts a manifest as an `update_weights_from_tensor` request with
`load_format=MANIFEST_CHECK`, before the first byte of the weights. Nothing is loaded; the reply's
message is a `ManifestVerdict`. A manifest that fitted is remembered for as long as the engine's
ranks, expert map and quantisation stay as they are.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sglang_loader.engine_context import checkpoint_folder, engine_context
from sglang_loader.load_plan.guard import Fingerprint
from sglang_loader.manifest_verdict import ManifestVerdict
from sglang_loader.rehearsal import NotRehearsable, Spec, rehearse
from sglang_loader.rehearsal.findings import (
    RankView,
    judge,
    missing_tensors,
    unscaled_tensors,
    unwritten_parameters,
    view_of,
)
from sglang_loader.rehearsal.published import Published, published_tensors
from sglang_loader.weight_manifest import decode_manifest, manifest_digest

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Gather = Callable[[Any], list[Any]]
"""Collective over the TP ranks: everybody's item, by rank."""

_accepted: WeakKeyDictionary[Any, tuple[str, Fingerprint]] = WeakKeyDictionary()


def manifest_of_request(request: Any) -> bytes:
    """The encoded manifest: one entry, the same for all TP ranks."""
    return base64.b64decode(request.serialized_named_tensors[0])


def served_checkpoint() -> Published | None:
    """The published checkpoint of this engine; None if its files tell nothing."""
    return published_tensors(checkpoint_folder())


def check_manifest(
    data: bytes,
    models: Sequence[Any],
    gather: Gather,
    read_published: Callable[[], Published | None] = served_checkpoint,
) -> ManifestVerdict:
    """Rehearse a manifest on this rank and agree with the others; each must call this.

    Args:
        data: the encoded manifest.
        models: those that an update visits: one, or the draft and then the target.
        gather: over the TP ranks.
        read_published: tells what is normal for the model.

    Raises:
        ManifestError: it is not a manifest.
    """
    started = time.perf_counter()
    manifest = decode_manifest(data)
    context = Fingerprint.of([], engine_context(models[-1]))
    known = manifest_digest(data), context
    if all(gather(_accepted.get(models[-1]) == known)):
        return ManifestVerdict()
    specs, published = manifest.specs(), read_published()
    views: list[RankView] = []
    problems: list[str] = []
    unscaled: list[str] = []
    for model in models:
        is_target = model is models[-1] and manifest.is_complete
        try:
            if _is_quantised(model):
                unscaled += unscaled_tensors(specs, rehearse(model, specs))
            _refuse_what_is_arranged(model, dict(context.context))
            views.append(_view(model, specs, published, is_target=is_target))
        except NotRehearsable as reason:
            problems.append(str(reason))
        except Exception as error:  # a rank that left now would leave the others waiting
            logger.exception("the manifest check itself failed")
            problems.append(f"the check itself failed: {error!r}")
    everyone = gather((views, problems, unscaled))
    if found := list(dict.fromkeys(text for *_, texts in everyone for text in texts)):
        return ManifestVerdict(mismatched=tuple(found))
    obstacle = next((text for _, problems, _ in everyone for text in problems), None)
    if obstacle is not None:
        return ManifestVerdict(not_checked=obstacle)
    verdict = judge(specs, [view for views, *_ in everyone for view in views], published)
    if verdict.fits and manifest.is_complete:
        _accepted[models[-1]] = known
    logger.info(
        "manifest of %d tensors: %s, in %.2f s",
        len(specs),
        "fits" if verdict.fits else verdict.text(),
        time.perf_counter() - started,
    )
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
