"""What a trainer exports: a checkpoint's tensors, kept in its memory, whole or in shards."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_loader.common.shared_memory import share_on_host
from support.trainer import NamedTensors

NORM = "model.norm.weight"


def weights_of(model: Path | str, device: torch.device, *, scale: float = 1.0) -> NamedTensors:
    """The checkpoint's tensors as verl exports them: every state-dict name, tied ones twice."""
    from safetensors.torch import load_file

    named = dict(load_file(Path(model, "model.safetensors")))
    if json.loads(Path(model, "config.json").read_text())["tie_word_embeddings"]:
        named.setdefault("lm_head.weight", named["model.embed_tokens.weight"])
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    scaled = {id(tensor): (tensor * scale).to(device, dtype) for tensor in named.values()}
    return [(name, scaled[id(tensor)]) for name, tensor in named.items()]


def store_tied_head(model: Path) -> None:
    """Write the tied output layer into the checkpoint: SGLang's MoE classes have one of their own,
    and leave it uninitialised when the file has none."""
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    named = load_file(file)
    named["lm_head.weight"] = named["model.embed_tokens.weight"].clone()
    save_file(named, file, {"format": "pt"})


def doubled(weights: NamedTensors, name: str = NORM) -> NamedTensors:
    """One tensor has twice its size."""
    return [(n, torch.cat([t, t]) if n == name else t) for n, t in weights]


def calling_at(
    weights: NamedTensors, index: int, act: Callable[[], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """An export in which something happens before the tensor of this index."""
    for i, pair in enumerate(weights):
        if i == index:
            act()
        yield pair


class KeptExport:
    """Full tensors that the trainer keeps and exports as they are.

    Attributes:
        state: the tensors by name. Tied ones, which are one tensor, by their first name.
    """

    def __init__(self, weights: NamedTensors) -> None:
        first = {id(tensor): name for name, tensor in reversed(weights)}
        self._owners = {name: first[id(tensor)] for name, tensor in weights}
        self.state = {name: self._kept(tensor) for name, tensor in self._own(weights)}

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return mappable(tensor.clone())

    def _own(self, weights: NamedTensors) -> NamedTensors:
        """Those of `weights` that are no second name of a tied tensor."""
        return [(name, tensor) for name, tensor in weights if self._owners[name] == name]

    def reexport(self) -> Any:
        from verl_sglang_sync.sources.export import Reexport

        return Reexport(self._export, sources=lambda: self.state)

    def write(self, weights: NamedTensors) -> None:
        for name, tensor in self._own(weights):
            self.state[name].copy_(tensor)

    def move(self, name: str) -> None:
        """Put one tensor elsewhere; what is where it was is wrong from now on."""
        old, self.state[name] = self.state[name], mappable(self.state[name].clone())
        old.fill_(7)

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.state[owner]) for name, owner in self._owners.items())


class ShardedExport(KeptExport):
    """The tensors in shards on all ranks, gathered at every export, as FSDP2's are.

    Args:
        weights: the full tensors.
        is_mappable: on a CPU, in memory that other processes can map, as a GPU's always is.
    """

    def __init__(self, weights: NamedTensors, *, is_mappable: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        size = torch.distributed.get_world_size()
        self._mesh = init_device_mesh(weights[0][1].device.type, (size,))
        self._is_mappable = is_mappable
        super().__init__(weights)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import Shard, distribute_tensor

        shard = distribute_tensor(tensor, self._mesh, [Shard(0)])
        if self._is_mappable:
            mappable(shard.to_local())
        return shard

    def write(self, weights: NamedTensors) -> None:
        for name, tensor in self._own(weights):
            rows = tensor.chunk(self._mesh.size())
            if (rank := self._mesh.get_local_rank()) < len(rows):
                self.state[name].to_local().copy_(rows[rank])

    def move(self, name: str) -> None:
        """Put one shard elsewhere; what is where it was is wrong from now on."""
        old, self.state[name] = self.state[name], self.state[name].clone()
        mappable(self.state[name].to_local())
        old.fill_(7)

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, shard.full_tensor()) for name, shard in super()._export())


class OffloadedExport(ShardedExport):
    """The shards are on the host between two exports, in other tensors after every write. An export
    moves one after the other to the device, as verl's does.
    """

    def __init__(self, weights: NamedTensors) -> None:
        super().__init__(weights)
        self._device = weights[0][1].device
        self._offload()

    def reexport(self) -> Any:
        from verl_sglang_sync.sources.export import Reexport

        sources = partial(getattr, self, "state")
        sources.is_offloaded = True  # type: ignore[attr-defined]
        return Reexport(self._export, sources=sources)

    def write(self, weights: NamedTensors) -> None:
        # On a CPU this is the training's copy.
        self.state = {name: shard.to(self._device, copy=True) for name, shard in self.state.items()}
        super().write(weights)
        self._offload()

    def _offload(self) -> None:
        from verl_sglang_sync.sources.host_memory import HOST_MEMORY

        with HOST_MEMORY.placing(self.state.values(), self._device):
            self.state = {name: shard.to("cpu") for name, shard in self.state.items()}
        assert HOST_MEMORY.problem is None, HOST_MEMORY.problem

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        shards = KeptExport._export(self)
        return ((name, shard.to(self._device).full_tensor()) for name, shard in shards)


def mappable(tensor: torch.Tensor) -> torch.Tensor:
    """Have other processes able to map its memory."""
    if tensor.device.type == "cpu":
        share_on_host(tensor)
    return tensor
