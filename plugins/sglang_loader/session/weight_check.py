"""Manifest check: whether the tensors of a sync fit the model, and are complete.

A `load_weights` drops names that the model does not have, casts dtypes silently, and does not
notice that a tensor is absent. So before a sync is published each TP rank examines the uses of the
sync's tensors (`uses` of its `ModelLoader`), and all ranks agree on one verdict:

    view = view_of_sync(layouts, models)        # on each rank by itself
    verdict = judge_together(view, gather)      # all ranks

The headers of the published checkpoint's files, a few kilobytes each, show what is normal for the
model: tensors that SGLang drops, parameters that no checkpoint has. Safetensors files and files of
`torch.save` are read, from the model's folder or from the hub's cache on this host.

A verdict is kept with its set of tensors, for as long as the engine's ranks, expert map and
quantisation stay the same, and tied tensors have the same bytes (`cached_verdict`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from sglang_loader.common.layout import BucketLayout, BucketTensor
from sglang_loader.load_plan.destinations import collect_destinations
from sglang_loader.load_plan.uses import merged_contents
from sglang_loader.session.findings import (
    PublishedTensors,
    RankView,
    Verdict,
    judge,
    missing_tensors,
    view_of,
    view_of_quantised,
)
from sglang_loader.session.model_loader import loader_of
from sglang_loader.upstream import engine_context, launch_arguments, starts_random

logger = logging.getLogger(__name__)

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

Checked = tuple[tuple[BucketLayout, ...], Mapping[str, object]]
"""The buckets of a sync, and the engine's context."""

Gather = Callable[[Any], list[Any]]
"""A collective over the TP ranks that returns every rank's item, by rank."""

_verdicts: WeakKeyDictionary[Any, tuple[Checked, Verdict]] = WeakKeyDictionary()


def cached_verdict(layouts: Sequence[BucketLayout], model: Any) -> Verdict | None:
    """Return the verdict on the last checked sync if it holds for this one, else None.

    It holds if the sync has the same tensors, and if tensors that were tied still are.
    """
    last = _verdicts.get(model)
    if last is None or last[0] != (tuple(layouts), engine_context(model)):
        return None
    verdict = last[1]
    contents = merged_contents(loader_of(model).uses) if verdict.tied else {}
    are_tied = (
        contents.get(name) == contents.get(other, "unknown") for name, other in verdict.tied.items()
    )
    return verdict if all(are_tied) else None


def served_checkpoint() -> PublishedTensors | None:
    """Read the checkpoint that this engine was launched with. Return None if that is impossible."""
    arguments = launch_arguments()
    folder = Path(arguments.model_path)
    return published_tensors(folder if folder.is_dir() else _cached_snapshot(arguments))


def _cached_snapshot(arguments: Any) -> Path:
    """Return the folder of a hub's model on this host, or a folder that does not exist."""
    # An engine with random weights has downloaded no weights. But a trainer on this host has.
    try:
        folder = snapshot_download(
            arguments.model_path, revision=arguments.revision, local_files_only=True
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError):
        return Path(arguments.model_path)
    return Path(folder)


@dataclass(frozen=True)
class SyncView:
    """One rank's views of a sync, one for each model.

    Attributes:
        target: the target model.
        checked: the buckets and the context that the views are of.
        published: the published checkpoint that the views were compared with, or None.
        views: one for each model.
    """

    target: Any
    checked: Checked
    published: PublishedTensors | None
    views: list[RankView]


def view_of_sync(
    layouts: Sequence[BucketLayout],
    models: Sequence[Any],
    read_published: Callable[[], PublishedTensors | None] = served_checkpoint,
) -> SyncView:
    """Build this rank's view of a sync, with one view for each model.

    Args:
        layouts: of the buckets that the models have loaded.
        models: one model, or a draft model and its target, the target last.
        read_published: returns the published checkpoint.
    """
    target = models[-1]
    context, published = engine_context(target), read_published()
    views = [_view(model, context, published, is_target=model is target) for model in models]
    return SyncView(target, (tuple(layouts), context), published, views)


def judge_together(view: SyncView, gather: Gather) -> Verdict:
    """Return all TP ranks' verdict on a sync. Each rank must call this."""
    views = [rank_view for rank_views in gather(view.views) for rank_view in rank_views]
    tensors = [tensor for layout in view.checked[0] for tensor in layout.tensors]
    verdict = judge(tensors, views, view.published)
    _verdicts[view.target] = view.checked, verdict
    return verdict


def _view(
    model: Any,
    context: Mapping[str, object],
    published: PublishedTensors | None,
    *,
    is_target: bool,
) -> RankView:
    uses = loader_of(model).uses
    if getattr(model, "quant_config", None) is not None:  # by SGLang, or its checkpoint is
        unknown = f"a quantised model ({context['quantization']}), except which weights are in fp8"
        return view_of_quantised(uses, unknown)
    if context["pp_size"] != 1:  # the ranks of one stage have only a part of the model
        return RankView(unknown=f"pipeline parallel, {context['pp_size']} stages")
    if problem := next((bucket.problem for bucket in uses if bucket.problem is not None), None):
        return RankView(unknown=problem)
    try:
        view = view_of(uses)
        if is_target:
            missing, doubtful = missing_tensors(
                uses, collect_destinations(model), published, starts_random=starts_random()
            )
            view = replace(view, missing=missing, doubtful=doubtful)
        return view
    except Exception as error:
        # A fault of the check must not fail a good sync. The verdict will be "not checked".
        logger.exception("the manifest check itself failed")
        return RankView(unknown=f"the check itself failed: {error!r}")


def published_tensors(folder: str | Path) -> PublishedTensors | None:
    """Read the names, shapes and dtypes of a checkpoint in `folder`.

    The safetensors files are read. Without any, `pytorch_model*.bin` is read.

    Returns:
        The tensors by name. None if there is no such checkpoint: no folder (a name on the hub),
            other file formats, an unknown dtype, or files that do not follow the format.
    """
    for suffix, read in ((".safetensors", _read_safetensors), (".bin", _read_pickled)):
        tensors: dict[str, BucketTensor] = {}
        try:
            for file in _files(Path(folder), suffix):
                tensors.update({tensor.name: tensor for tensor in read(file)})
        except (OSError, KeyError, RuntimeError, SafetensorError, UnpicklingError, AttributeError):
            continue  # the other format may be complete
        if tensors:
            return tensors
    return None


def _read_safetensors(file: Path) -> Iterator[BucketTensor]:
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            tensor = tensors.get_slice(name)
            dtype, shape = _DTYPES[tensor.get_dtype()], tuple(tensor.get_shape())
            yield BucketTensor(name, shape, dtype, 0)


def _read_pickled(file: Path) -> Iterator[BucketTensor]:
    # No data is read: the tensors are on the meta device. No code in the file is executed.
    saved = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    for name, tensor in saved.items():
        yield BucketTensor(name, tuple(tensor.shape), tensor.dtype, 0)


_STEMS = {".safetensors": "model", ".bin": "pytorch_model"}


def _files(folder: Path, suffix: str) -> list[Path]:
    """Return the files that the index names. Without an index, return all files of the format."""
    # The index comes first: a folder may hold a second copy of the weights.
    stem = _STEMS[suffix]
    index = folder / f"{stem}{suffix}.index.json"
    try:
        named = json.loads(index.read_text())["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError):
        # Other .bin files may be anything: an optimizer's state, a training's arguments.
        return sorted(folder.glob(f"{stem}*{suffix}" if suffix == ".bin" else f"*{suffix}"))
    return sorted(folder / name for name in set(named))
