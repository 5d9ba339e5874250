"""FSDP1's flat parameters, as the sources of an export (`sources.snapshot.Sources`).

FSDP1 concatenates the parameters of each module that it wraps, such as a decoder layer, into a flat
one, and cuts that into shards of equal length, one for each rank. An exported weight is a run of
its bytes: in one shard, or in several that follow each other.

An export starts from `state_dict`, which has more than FSDP1 knows of: a module that was put in the
place of another, a parameter or a buffer that was registered later, and what a hook makes of all.
So each time that the shards are listed the module must still be what FSDP1 has wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name

from sglang_loader.common.regions.compose import ByteMap
from verl_sglang_sync.ranks import world_size
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import (
    NotTraceable,
    StandIn,
    TracedExport,
    TracedParameter,
    trace_export,
)
from verl_sglang_sync.sources.snapshot import SourcesChanged
from verl_sglang_sync.sources.transfer_plan import Owners


class FlatParameters:
    """This rank's shards, by the name of the module whose parameters they are.

    Args:
        module: the root, which FSDP1 wraps, too.
        model_type: of the Hugging Face model.
    """

    def __init__(self, module: FullyShardedDataParallel, model_type: str) -> None:
        self._module, self._model_type = module, model_type

    def __call__(self) -> Mapping[str, torch.Tensor]:
        """List the shards. Raises `SourcesChanged` if an export would have more than these."""
        handles, problem = _wrapped_by_fsdp1(self._module)
        if problem is not None:
            raise SourcesChanged(problem)
        return {_label(name): _shard(handle) for name, handle in handles}

    def trace(self, device: torch.device) -> TracedExport:
        """Trace what verl makes of the weights, but for gathering them, which communicates.

        Raises:
            NotTraceable: the shards are on another device, or not what is expected of them.
        """
        from verl.utils.model import convert_weight_keys
        from verl.workers.engine.fsdp.utils import unfuse_moe_params

        weights: dict[str, StandIn] = {}
        handles, problem = _wrapped_by_fsdp1(self._module)
        for name, handle in handles:
            if (place := _shard(handle).device).type != device.type:
                raise NotTraceable(f"the parameters are offloaded ({place})")
            if handle._use_orig_params:  # what is assigned to them is not in the shards at once
                raise NotTraceable("FSDP1 keeps the original parameters (use_orig_params=True)")
            for key, weight in _weights_in(name, handle).items():
                weights[f"{name}.{key}" if name else key] = weight
        if problem is not None:
            raise NotTraceable(problem)
        named = {key: stand_in.tensor for key, stand_in in weights.items()}
        named = convert_weight_keys(named, self._module._fsdp_wrapped_module)
        export: Iterable[NamedTensor] = unfuse_moe_params(named.items(), self._model_type)
        return trace_export(
            export,
            sources=self,
            world_size=world_size(),
            device=device,
            stand_ins=weights.values(),
        )


def _label(module: str) -> str:
    return module or "the root module"


def _wrapped_by_fsdp1(root: FullyShardedDataParallel) -> tuple[list[tuple[str, Any]], str | None]:
    """What FSDP1 knows of each flat parameter, by the name of its module, and what `state_dict`
    would have beside these, or otherwise, in words, or None.
    """
    modules = {_path(name): part for name, part in root.named_modules(remove_duplicate=False)}
    units = [(name, part) for name, part in root.named_modules() if _has_handle(part)]
    handles = [(clean_tensor_name(name), part._handle) for name, part in units]
    problems = chain(_replaced(modules, handles), _beside(root, handles))
    return handles, next(problems, None)


def _has_handle(module: torch.nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel) and module._handle is not None


def _path(name: str) -> str:
    """A module's name and a dot, the same for a module and for what FSDP1 has wrapped it in."""
    return clean_tensor_name(f"{name}.") if name else ""


def _beside(root: torch.nn.Module, handles: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """What `state_dict` has that is in no flat parameter."""
    flat = {id(handle.flat_param) for _, handle in handles}
    for name, part in root.named_modules():
        for buffer in part._buffers.keys() - part._non_persistent_buffers_set:
            found = _path(name) + buffer
            yield f"FSDP1 keeps {found}, a buffer, outside its flat parameters"
        for key, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in flat:
                yield f"FSDP1 has {_path(name)}{key}, a parameter, in no flat parameter"
        hooks = (*part._state_dict_hooks.values(), *part._state_dict_pre_hooks.values())
        others = [hook for hook in hooks if not _is_fsdps(hook)]
        if others or not _OVERRIDES.isdisjoint(vars(part)):
            yield f"the state_dict of {_label(_path(name).rstrip('.'))} has a hook"


_OVERRIDES = frozenset(("state_dict", "_save_to_state_dict", "get_extra_state"))
"""Methods that `state_dict` calls; one that a module has of its own is a hook, too."""


def _is_fsdps(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _replaced(
    modules: Mapping[str, torch.nn.Module], handles: Sequence[tuple[str, Any]]
) -> Iterator[str]:
    """The modules that are not those, or not in the order, whose parameters FSDP1 has flattened.

    Args:
        modules: by path, in their order now.
    """
    places = {path: place for place, path in enumerate(modules)}
    for unit, handle in handles:
        flat, last = handle.flat_param, 0
        for info in flat._param_infos:
            path = _path(unit) + _path(info.module_name)
            if modules.get(path) is not info.module:
                yield f"FSDP1 has wrapped another module than {path.rstrip('.')}"
            elif (place := places[path]) < last:
                yield f"{path.rstrip('.')} is in another place than when FSDP1 has wrapped it"
            else:
                last = place
        for tied in flat._shared_param_infos:
            path = _path(unit) + _path(tied.module_name)
            if modules.get(path) is not tied.module:
                yield f"FSDP1 has wrapped another module than {path.rstrip('.')}"


def _shard(handle: Any) -> torch.Tensor:
    """This rank's shard, also while FSDP1 has the gathered parameter in its place.

    Raises:
        SourcesChanged: somebody has given the parameter other data.
    """
    flat = handle.flat_param
    shard: torch.Tensor = getattr(flat, "_local_shard", flat.data)  # set before it is gathered
    is_sharded = (flat.shape, flat.dtype) == (shard.shape, shard.dtype)
    if is_sharded and flat.data_ptr() != shard.data_ptr():
        raise SourcesChanged("a flat parameter has other data than FSDP1 has noted")
    return shard


def _weights_in(module: str, handle: Any) -> dict[str, StandIn]:
    """The weights in a flat parameter, by their names in its module."""
    flat, shard, is_sharded = handle.flat_param, _shard(handle), handle.uses_sharded_strategy
    ranks = dist.get_process_group_ranks(handle.process_group)
    shards = [(rank,) for rank in ranks] if is_sharded else [tuple(ranks)]
    starts = tuple(i * shard.nbytes for i in range(len(shards)))
    owners = Owners(starts, tuple(shards), len(shards) * shard.nbytes)
    parameter = TracedParameter(_label(module), owners)
    firsts = accumulate(flat._numels[:-1], initial=0)
    first_own = handle.rank * shard.numel() if is_sharded else 0
    own = range(first_own, first_own + shard.numel())
    weights = {}
    known = zip(flat._shapes, flat._contiguities, flat._shard_param_infos, strict=True)
    for name, first, (shape, is_dense, info) in zip(flat._fqns, firsts, known, strict=True):
        if not is_dense or _part_of(range(first, first + shape.numel()), own) != _known_part(info):
            where = f"{name} of {_label(module)}"
            raise NotTraceable(f"FSDP1 has {where} elsewhere, or in other order, than expected")
        tensor = torch.empty(shape, dtype=shard.dtype, device="meta")
        bytes_ = ByteMap(first * shard.itemsize, ((max(tensor.nbytes, 1), 1),))
        weights[clean_tensor_name(name)] = StandIn(tensor, parameter, bytes_)
    for tied in flat._shared_param_infos:
        name = clean_tensor_name(f"{tied.prim_module_name}.{tied.prim_param_name}")
        weights[clean_tensor_name(f"{tied.module_name}.{tied.param_name}")] = weights[name]
    return weights


_Part = tuple[int, int, int] | None
"""Of a weight in this rank's shard: where it begins there, how many elements it has, and where it
begins in the weight.
"""


def _part_of(weight: range, own: range) -> _Part:
    start, stop = max(weight.start, own.start), min(weight.stop, own.stop)
    return (start - own.start, stop - start, start - weight.start) if start < stop else None


def _known_part(info: Any) -> _Part:
    """What FSDP1 itself has noted."""
    part = info.offset_in_shard, info.numel_in_shard, info.intra_param_start_idx
    return part if info.in_shard else None
