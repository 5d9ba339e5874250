"""FSDP1's flat parameters, as the sources of an export (`sources.snapshot.Sources`).

FSDP1 concatenates the parameters of each module that it wraps, such as a decoder layer, into a flat
parameter. FSDP1 cuts a flat parameter into shards of equal length, one for each rank. An exported
weight is a run of the flat parameter's bytes, in one shard or in several consecutive ones.

An export starts from `state_dict`. A replaced module, a parameter or buffer that was registered
later, or a hook changes `state_dict`, and leaves FSDP1's records as they were. So the module is
compared with FSDP1's records each time that the shards are listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name

from sglang_loader.common.regions.compose import ByteMap
from verl_sglang_sync.sources.export_trace import (
    NotTraceable,
    StandIn,
    TracedExport,
    TracedParameter,
    trace_export,
)
from verl_sglang_sync.sources.host_memory import HOST_MEMORY
from verl_sglang_sync.sources.owners import Owners
from verl_sglang_sync.sources.snapshot import SourcesChanged
from verl_sglang_sync.trainer_ranks import world_size
from verl_sglang_sync.verl.checkpoint_format import in_checkpoint_format


class FlatParameters:
    """Sources that list this rank's shards, by the name of the module whose parameters they are.

    Args:
        module: the root module, wrapped by FSDP1.

    Attributes:
        is_offloaded: see the function of this name.
    """

    def __init__(self, module: FullyShardedDataParallel, *, is_offloaded: bool = False) -> None:
        self._module = module
        self.is_offloaded = is_offloaded

    def __call__(self) -> Mapping[str, torch.Tensor]:
        """List this rank's shards, by the name of their module.

        Raises:
            SourcesChanged: `state_dict` differs from FSDP1's records.
        """
        handles, problem = _wrapped_by_fsdp1(self._module)
        if problem is not None:
            raise SourcesChanged(problem)
        return {_label(name): _shard(handle) for name, handle in handles}

    def trace(self, device: torch.device) -> TracedExport:
        """Trace what verl's export does with gathered weights, with stand-ins in their place.

        Raises:
            NotTraceable: the shards are on another device, or not where they are expected.
        """
        from verl.utils.model import convert_weight_keys

        weights: dict[str, StandIn] = {}
        handles, problem = _wrapped_by_fsdp1(self._module)
        for name, handle in handles:
            shard = _shard(handle)
            is_here = shard.device.type == device.type
            if not is_here and HOST_MEMORY.file_of(shard.data_ptr()) is None:
                raise NotTraceable(f"the parameters are offloaded ({shard.device})")
            # A value assigned to an original parameter is not in the shard at once.
            if handle._use_orig_params:
                raise NotTraceable("FSDP1 keeps the original parameters (use_orig_params=True)")
            for key, weight in _weights_in(name, handle).items():
                weights[f"{name}.{key}" if name else key] = weight
        if problem is not None:
            raise NotTraceable(problem)
        # From here on as in the real export: rename the weights, then convert their format.
        named = {key: stand_in.tensor for key, stand_in in weights.items()}
        model = self._module._fsdp_wrapped_module
        named = convert_weight_keys(named, model)
        return trace_export(
            in_checkpoint_format(named.items(), model),
            sources=self,
            world_size=world_size(),
            device=device,
            stand_ins=weights.values(),
        )


def _label(module: str) -> str:
    return module or "the root module"


def _wrapped_by_fsdp1(root: FullyShardedDataParallel) -> tuple[list[tuple[str, Any]], str | None]:
    """Compare a module with FSDP1's records.

    Returns:
        FSDP1's handle of each flat parameter, with the name of its module. Then the first
        difference between `state_dict` and these, in words, or None.
    """
    modules = {_path(name): part for name, part in root.named_modules(remove_duplicate=False)}
    units = [(name, part) for name, part in root.named_modules() if _has_handle(part)]
    handles = [(clean_tensor_name(name), part._handle) for name, part in units]
    problems = chain(_replaced(modules, handles), _beside(root, handles))
    return handles, next(problems, None)


def _has_handle(module: torch.nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel) and module._handle is not None


def _path(name: str) -> str:
    """Return a module's name and a dot, the same for a module and for FSDP1's wrapper of it."""
    return clean_tensor_name(f"{name}.") if name else ""


def _beside(root: torch.nn.Module, handles: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Describe each part of `state_dict` that is in no flat parameter."""
    flat = {id(handle.flat_param) for _, handle in handles}
    for name, part in root.named_modules():
        # Persistent buffers are in `state_dict`, and FSDP1 does not shard them.
        for buffer in part._buffers.keys() - part._non_persistent_buffers_set:
            yield f"FSDP1 keeps {_path(name)}{buffer}, a buffer, outside its flat parameters"
        for key, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in flat:
                yield f"FSDP1 has {_path(name)}{key}, a parameter, in no flat parameter"
        hooks = (*part._state_dict_hooks.values(), *part._state_dict_pre_hooks.values())
        is_hooked = not all(map(_is_from_fsdp, hooks))
        if is_hooked or not _OVERRIDES.isdisjoint(vars(part)):
            yield f"the state_dict of {_label(_path(name).rstrip('.'))} has a hook"


_OVERRIDES = frozenset(("state_dict", "_save_to_state_dict", "get_extra_state"))
"""Methods that `state_dict` calls. A method set on a module, not on its class, counts as a hook."""


def _is_from_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _replaced(
    modules: Mapping[str, torch.nn.Module], handles: Sequence[tuple[str, Any]]
) -> Iterator[str]:
    """Describe each module that was replaced or moved since FSDP1 flattened its parameters.

    Args:
        modules: the modules by path, in order.
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
    """Return this rank's shard, also while FSDP1 has the gathered parameter in its place.

    Raises:
        SourcesChanged: the parameter has other data than FSDP1 has recorded.
    """
    flat = handle.flat_param
    # FSDP1 sets `_local_shard` before the first gather.
    shard: torch.Tensor = getattr(flat, "_local_shard", flat.data)
    is_sharded = (flat.shape, flat.dtype) == (shard.shape, shard.dtype)
    if is_sharded and flat.data_ptr() != shard.data_ptr():
        raise SourcesChanged("a flat parameter has other data than FSDP1 has recorded")
    return shard


def _weights_in(module: str, handle: Any) -> dict[str, StandIn]:
    """Return a stand-in for each weight in a flat parameter, by the weight's name in its module.

    Raises:
        NotTraceable: FSDP1 has recorded another place or order of a weight.
    """
    flat, shard, is_sharded = handle.flat_param, _shard(handle), handle.uses_sharded_strategy
    ranks = dist.get_process_group_ranks(handle.process_group)
    shards = [(rank,) for rank in ranks] if is_sharded else [tuple(ranks)]
    # A flat parameter is the concatenation of equal shards, padded at the end.
    starts = tuple(i * shard.nbytes for i in range(len(shards)))
    owners = Owners(starts, tuple(shards), len(shards) * shard.nbytes)
    parameter = TracedParameter(_label(module), owners)
    firsts = accumulate(flat._numels[:-1], initial=0)
    first_own = handle.rank * shard.numel() if is_sharded else 0
    own = range(first_own, first_own + shard.numel())
    weights = {}
    records = zip(flat._shapes, flat._contiguities, flat._shard_param_infos, strict=True)
    for name, first, (shape, is_dense, info) in zip(flat._fqns, firsts, records, strict=True):
        # FSDP1 records which part of a weight is in this rank's shard. Check the computed place.
        part = _part_of(range(first, first + shape.numel()), own)
        if not is_dense or part != _recorded_part(info):
            weight = f"{name} of {_label(module)}"
            raise NotTraceable(f"FSDP1 has {weight} elsewhere, or in other order, than expected")
        tensor = torch.empty(shape, dtype=shard.dtype, device="meta")
        bytes_ = ByteMap(first * shard.itemsize, ((max(tensor.nbytes, 1), 1),))
        weights[clean_tensor_name(name)] = StandIn(tensor, parameter, bytes_)
    # A tied weight has no bytes of its own.
    for tied in flat._shared_param_infos:
        name = clean_tensor_name(f"{tied.prim_module_name}.{tied.prim_param_name}")
        weights[clean_tensor_name(f"{tied.module_name}.{tied.param_name}")] = weights[name]
    return weights


_Part = tuple[int, int, int] | None
"""The part of a weight in this rank's shard: first element in the shard, number of elements, and
first element in the weight. None if the shard has no part."""


def _part_of(weight: range, own: range) -> _Part:
    start, stop = max(weight.start, own.start), min(weight.stop, own.stop)
    return (start - own.start, stop - start, start - weight.start) if start < stop else None


def _recorded_part(info: Any) -> _Part:
    """Return the part that FSDP1 has recorded."""
    part = info.offset_in_shard, info.numel_in_shard, info.intra_param_start_idx
    return part if info.in_shard else None
