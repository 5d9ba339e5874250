"""Conversion of exported tensors to the names and layouts of the model's checkpoint.

    for name, tensor in in_checkpoint_format(gathered, model): ...

transformers 5 renames tensors of a checkpoint when it loads them, and fuses the experts of a layer.
SGLang's `load_weights` needs the tensors of the checkpoint. `save_pretrained` converts them back,
the whole model at once. Here the same conversions are applied to one gathered tensor after the
other.

Only names and shapes decide what is converted, so all ranks decide alike. Most results are views of
the gathered tensors, in which a traced export finds the parameters' bytes. If loading a converted
tensor would not restore the original, the tensor stays as verl exports it. The engine's manifest
check names tensors that do not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from verl_sglang_sync.sources.export import NamedTensor

_REARRANGE = frozenset(
    f"{WeightConverter.__module__}.{operation}"
    for operation in (
        "Chunk",
        "Concatenate",
        "Conv3dToLinear",
        "ErnieSplitAndDecoupleTextVisionExperts",
        "LinearToConv3d",
        "SplitModulelist",
        "Transpose",
    )
)
"""The names of transformers' operations that only rearrange a known number of tensors in a save.
Names, because not every release of transformers has all operations."""


def in_checkpoint_format(weights: Iterable[NamedTensor], model: Any) -> Iterator[NamedTensor]:
    """Convert the full tensors of a transformers model's state.

    Fused experts without a conversion are taken apart, as in verl's export.

    Args:
        weights: the tensors, with the names of the state of `model`.
    """
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    if model not in _formats:
        _formats[model] = _CheckpointFormat(model)
    if _formats[model].is_the_models:
        yield from unfuse_moe_params(weights, model.config.model_type)
        return
    for is_converted, name, tensor in _formats[model].converted(weights):
        if is_converted:
            yield name, tensor
        else:
            yield from unfuse_moe_params([(name, tensor)], model.config.model_type)
        del tensor  # frees the memory for the next tensor


class _CheckpointFormat:
    """The conversions of one model's tensors, in both directions. Holds no tensors."""

    def __init__(self, model: Any) -> None:
        known = _known_conversions(model)
        used = getattr(model, "_weight_conversions", None)  # set by `from_pretrained`
        self._loading: list[Any] = known if used is None else list(used)
        self._model = _saved_with(self._loading, model.config)
        conversions = reversed(self._model._weight_conversions)
        inverses = (conversion.reverse_transform() for conversion in conversions)
        self._saving = list(inverses)
        self._decisions: dict[Any, bool] = {}
        self._names_of_tied = _names_of_tied(model, known) if self._saving else {}

    @property
    def is_the_models(self) -> bool:
        """True if the checkpoint's names and layouts are those of the model."""
        return not self._saving

    def converted(self, weights: Iterable[NamedTensor]) -> Iterator[tuple[bool, str, torch.Tensor]]:
        """Yield (True if the tensor was converted, name, tensor).

        Tensors that are converted together are held until all of them have come.
        """
        waiting: dict[str, dict[str, NamedTensor]] = {}  # by name of the group, then by pattern
        for name, tensor in weights:
            group, pattern, num_members = self._group_of(name)
            if pattern is None:
                yield from self._of_group({name: tensor}, is_converted=False)
            elif pattern in (members := waiting.setdefault(group, {})):
                yield False, name, tensor  # neither is lost: one of them does not fit the engine
            else:
                members[pattern] = name, tensor
                if len(members) == num_members:
                    del waiting[group]
                    yield from self._of_group(dict(members.values()), is_converted=True)
                del members
            del tensor
        for members in waiting.values():
            for name, tensor in members.values():
                yield False, name, tensor

    def _group_of(self, name: str) -> tuple[str, str | None, int]:
        """Return the name of a tensor's group, the tensor's pattern, and the number of members.

        The pattern is None if only the tensor's name may change.
        """
        renamings, converters = _by_kind(self._saving)
        # transformers 5.8 renames before it converts, later releases do so afterwards.
        for first in (renamings, []):
            group, pattern = rename_source_key(name, first, converters)
            if pattern is not None:
                return group, pattern, len(_converter_of(pattern, converters).source_patterns)
        return name, None, 1

    def _of_group(
        self, members: dict[str, torch.Tensor], *, is_converted: bool
    ) -> Iterator[tuple[bool, str, torch.Tensor]]:
        if (tied := self._names_of_tied.keys() & members) and not is_converted:
            [name] = tied
            yield False, self._names_of_tied[name], members[name]
            return
        if not self._is_to_convert(members):
            for name, tensor in members.items():
                yield False, name, tensor
            return
        saved = revert_weight_conversion(self._model, members)
        members.clear()
        for name in sorted(saved, key=dot_natural_key):
            tensor = saved.pop(name)
            yield is_converted, name, tensor.contiguous() if is_converted else tensor

    def _is_to_convert(self, members: Mapping[str, torch.Tensor]) -> bool:
        """Return True if loading the converted tensors would restore names and shapes.

        False, too, if verl's own export has the same tensors.
        """
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in members.items())
        if key not in self._decisions:
            with _disable_current_modes():  # a trace of the export does not follow this
                self._decisions[key] = self._decide(
                    {name: torch.empty_like(t, device="meta") for name, t in members.items()}
                )
        return self._decisions[key]

    def _decide(self, members: Mapping[str, torch.Tensor]) -> bool:
        from verl.workers.engine.fsdp.utils import unfuse_moe_params

        verls = dict(unfuse_moe_params(members.items(), self._model.config.model_type))
        try:
            saved = revert_weight_conversion(self._model, members)
            loaded = _loaded(saved, self._loading, self._model)
        except Exception:  # one of transformers' operations does not fit these tensors
            return False
        made = {name: (tensor.shape, tensor.dtype) for name, tensor in loaded.items()}
        is_undone = made == {n: (t.shape, t.dtype) for n, t in members.items()}
        return is_undone and _places(saved) != _places(verls)


def _places(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride())
        for name, t in tensors.items()
    }


_formats: WeakKeyDictionary[Any, _CheckpointFormat] = WeakKeyDictionary()


class _Inverted:
    """A conversion that holds its inverse."""

    def __init__(self, inverse: Any) -> None:
        self._inverse = inverse

    def reverse_transform(self) -> Any:
        return self._inverse


def _known_conversions(model: Any) -> list[Any]:
    """Return the conversions that `save_pretrained` undoes for a model that was not loaded."""
    with _own_classes(model):
        known = get_model_conversion_mapping(model, add_legacy=False)
    # Without a checkpoint no prefix was removed from its names.
    return [conversion for conversion in known if type(conversion).__name__ != "PrefixChange"]


@contextmanager
def _own_classes(model: torch.nn.Module) -> Iterator[None]:
    """Replace the classes that FSDP2 has derived by those from which it has, for a while."""
    # transformers knows models by their classes, and from 5.19 on gives others no conversion.
    sharded = [(each, type(each)) for each in model.modules() if isinstance(each, FSDPModule)]
    try:
        for module, derived in sharded:
            module.__class__ = derived.__mro__[2]  # after the derived class and `FSDPModule`
        yield
    finally:
        for module, derived in sharded:
            module.__class__ = derived


def _names_of_tied(model: Any, conversions: Sequence[Any]) -> dict[str, str]:
    """Return the names that tied parameters would have in a checkpoint."""
    # Checkpoints lack these parameters, so loading has used no conversion of their names.
    saved_with, names = _saved_with(conversions, model.config), {}
    for name in getattr(model, "all_tied_weights_keys", ()):
        saved = revert_weight_conversion(saved_with, {name: torch.empty(0, device="meta")})
        if list(_loaded(saved, conversions, saved_with)) == [name]:
            [names[name]] = saved
    return names


def _saved_with(conversions: Sequence[Any], config: Any) -> Any:
    """Return a stand-in for a model that was loaded with these conversions."""
    # It has all that `revert_weight_conversion` reads.
    inverses = map(_inverse, conversions)
    used = [_Inverted(inverse) for inverse in inverses if inverse is not None]
    return SimpleNamespace(config=config, _weight_conversions=used)


def _inverse(conversion: Any) -> Any | None:
    """Return a conversion's inverse, or None if it may not be what the checkpoint has."""
    try:
        inverse = conversion.reverse_transform()
    except (NotImplementedError, ValueError):  # a tensor was computed, or quantised
        return None
    for operation in getattr(inverse, "operations", ()):
        kind = type(operation)
        if f"{kind.__module__}.{kind.__qualname__}" not in _REARRANGE:
            return None
        # Loading transposes only what has another shape than the parameter. The model does not
        # show whether the checkpoint had.
        if getattr(operation, "check_dims", False):
            return None
    return inverse


def _loaded(
    saved: Mapping[str, torch.Tensor], conversions: Sequence[Any], model: Any
) -> dict[str, torch.Tensor]:
    """Convert some of a checkpoint's tensors as `from_pretrained` does."""
    renamings, converters = _by_kind(conversions)
    loaded: dict[str, torch.Tensor] = {}
    collected: dict[str, Any] = {}
    for name in sorted(saved, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            loaded[renamed] = saved[name]
            continue
        if renamed not in collected:
            collected[renamed] = deepcopy(_converter_of(pattern, converters))
        collected[renamed].add_tensor(renamed, name, pattern, saved[name])
    for renamed, converter in collected.items():
        made = converter.convert(renamed, model=model, config=model.config)
        loaded |= {name: t[0] if isinstance(t, list) else t for name, t in made.items()}
    return loaded


def _by_kind(conversions: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the renamings and the converters."""
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    return renamings, [c for c in conversions if isinstance(c, WeightConverter)]


def _converter_of(pattern: str, converters: Sequence[Any]) -> Any:
    # transformers takes the last converter of those that share a pattern.
    return next(c for c in reversed(converters) if pattern in c.source_patterns)
