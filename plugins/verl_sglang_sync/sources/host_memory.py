"""The trainer's offloaded parameters, in host memory that engines map.

torch copies an offloaded parameter to new host memory, which no other process can map. While
`HOST_MEMORY.placing(...)` runs, torch's own code runs, and only the memory of its copies is ours:

    with HOST_MEMORY.placing(tensors, device):
        module.to("cpu")               # the copies of `tensors` are in files of host memory
    HOST_MEMORY.problem                # the reason why some are not, or None

A copy is freed as every tensor is. The next offload takes the same places in the same order, so the
parameters have the same addresses in all syncs, and the memory is pinned once. A place of a tensor
that is still in use is not taken.
"""

from __future__ import annotations

import gc
import math
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_loader.common.host_memory import HostFile
from sglang_loader.common.ranks import Reason

ALIGNMENT = 512
"""Bytes between the beginnings of places, as of torch's own memory on a GPU."""
MIN_FILE_BYTES = 16 << 20
"""The smallest size of a file after the first one. A file costs an engine a mapping."""
MEMORY_LEFT = 0.05
"""Part of the host's memory that must stay free."""
CONTROL_GROUP = Path("/sys/fs/cgroup")
CONTROL_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        *("memory/memory.stat", "total_inactive_file"),
    ),
)
"""Files of each version of control groups: the limit, the used memory, and the statistics with a
line for cached files, which has the name that stands last."""


@dataclass(eq=False)
class _Places:
    """A file, and the storages in it: offset and size of each, and a reference if it was taken."""

    file: HostFile
    end: int = 0
    taken: dict[tuple[int, int], StorageWeakRef] = field(default_factory=dict)

    @property
    def is_free(self) -> bool:
        return all(ref.expired() for ref in self.taken.values())


class HostMemory:
    """All files of host memory of this process.

    Attributes:
        problem: the reason why the last placing has left a tensor elsewhere, or None.
    """

    def __init__(self) -> None:
        self.problem: Reason | None = None
        self._places: list[_Places] = []

    @property
    def nbytes(self) -> int:
        """The size of all files, which are pinned for a GPU."""
        return sum(places.file.nbytes for places in self._places)

    def file_of(self, address: int) -> HostFile | None:
        """Return the file that contains an address of the host, or None."""
        for places in self._places:
            if 0 <= address - places.file.address < places.file.nbytes:
                return places.file
        return None

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the same bytes as a tensor on the device that reads the file.

        Args:
            memory: flat uint8. Memory outside of the files is returned as it is.
        """
        file = self.file_of(memory.data_ptr()) if memory.device.type == "cpu" else None
        if file is None:
            return memory
        start = memory.data_ptr() - file.address
        return file.view[start : start + memory.numel()]

    @contextmanager
    def placing(self, tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[None]:
        """Place all copies of these tensors to the host in the files while the body runs.

        Tensors that are on the host elsewhere are copied, too. If there is no memory for a copy,
        torch makes the copy as it does otherwise, and `problem` has the reason.

        Args:
            device: the device that is to read the files.
        """
        storages = _storages(tensors)
        del tensors  # torch must be able to free them within the body
        wanted, expected = frozenset(storages), sum(map(_rounded, storages.values()))
        self.problem = None
        with _CopyOnHost(self, wanted), _PlaceCopies(_Placing(self, device, expected), wanted):
            yield


HOST_MEMORY = HostMemory()
"""The host memory of this process, of which there is one, as there is one of each GPU."""


class _Placing:
    """The places for one offload.

    Args:
        expected: bytes that the offload needs in all.
    """

    def __init__(self, memory: HostMemory, device: torch.device, expected: int) -> None:
        self._memory = memory
        self._device = device
        self._expected = expected
        self._num_taken = 0
        self._has_collected = False
        self._find_free()

    def _find_free(self) -> None:
        """Find the free places by size, in the order in which they were first taken."""
        self._free: dict[int, deque[tuple[_Places, int]]] = defaultdict(deque)
        for places in self._memory._places:
            for (offset, size), ref in places.taken.items():
                if ref.expired():
                    self._free[size].append((places, offset))

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return memory for a copy, flat uint8 with a storage of its own, or None."""
        if self._memory.problem is not None:
            return None
        size = _rounded(nbytes)
        if not self._free[size] and self._memory._places and not self._has_collected:
            # Tensors of the last offload may be in cycles of references.
            gc.collect()
            self._find_free()
            self._has_collected = True
        if self._free[size]:
            places, offset = self._free[size].popleft()
        else:
            last = self._memory._places[-1] if self._memory._places else None
            if last is None or last.end + size > last.file.nbytes:
                last = self._grow(size)
            if last is None:
                return None
            places, offset = last, last.end
            places.end += size
        self._num_taken += size
        memory = torch.frombuffer(
            places.file.buffer, dtype=torch.uint8, count=nbytes, offset=offset
        )
        places.taken[offset, size] = StorageWeakRef(memory.untyped_storage())
        return memory

    def _grow(self, size: int) -> _Places | None:
        """Add a file for the rest of the offload, and drop the files that nothing uses."""
        memory = self._memory
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a copy to the GPU may still read what is dropped
            # torch keeps the host memory of its own copies of the parameters.
            torch._C._host_emptyCache()
        memory._places = [places for places in memory._places if not places.is_free]
        self._free.clear()
        nbytes = max(size, self._expected - self._num_taken, bool(memory._places) * MIN_FILE_BYTES)
        try:
            memory.problem = _lack_of_memory(nbytes)
            if memory.problem is None:
                memory._places.append(_Places(HostFile(nbytes, self._device)))
                return memory._places[-1]
        # `CannotPin` and torch's own errors are RuntimeErrors.
        except (OSError, RuntimeError) as error:
            text = f"{nbytes} bytes of host memory cannot be shared: {error}"
            memory.problem = Reason(text, is_final=isinstance(error, RuntimeError))
        return None


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _lack_of_memory(nbytes: int) -> Reason | None:
    """Return a reason if the trainer ranks of this host have no room for so many bytes each."""
    # All ranks make their files at the same time. Too much would end processes, without an error.
    num_ranks = int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1"))
    left = _available_bytes() - int(psutil.virtual_memory().total * MEMORY_LEFT)
    if num_ranks * nbytes <= left:
        return None
    text = (
        f"{num_ranks} ranks with {nbytes / 1e9:.3g} GB of offloaded parameters each do not fit "
        f"into the {max(left, 0) / 1e9:.3g} GB of host memory that are free"
    )
    return Reason(text, is_final=False)


def _available_bytes() -> int:
    """Return the memory that the host, and the control group of this container, have left."""
    available: int = psutil.virtual_memory().available
    for limit, used, stat, cached in CONTROL_GROUP_FILES:
        # The files are those of one version of control groups. A limit may be "max".
        with suppress(OSError, ValueError, KeyError):
            lines = (CONTROL_GROUP / stat).read_text().splitlines()
            freeable = int(dict(line.split(" ", 1) for line in lines)[cached])
            in_use = int((CONTROL_GROUP / used).read_text()) - freeable
            available = min(available, int((CONTROL_GROUP / limit).read_text()) - in_use)
    return available


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the size of each storage of this rank's parts, by the storage's identity."""
    storages = [_local(tensor).untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}


Wanted = frozenset[int]
"""The identities of the storages of the tensors whose copies are placed."""


class _CopyOnHost(TorchFunctionMode):
    """A mode in which `Tensor.to` copies tensors of the host, too, unless they are in a file."""

    def __init__(self, memory: HostMemory, wanted: Wanted) -> None:
        super().__init__()
        self._memory = memory
        self._wanted = wanted

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and self._memory.problem is None and self._is_elsewhere(args[0]):
            kwargs = {**kwargs, "copy": True}
        return func(*args, **kwargs)

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        local = _local(tensor)
        if local.device.type != "cpu" or local.untyped_storage()._cdata not in self._wanted:
            return False
        return self._memory.file_of(local.data_ptr()) is None


class _PlaceCopies(TorchDispatchMode):
    """A mode in which copies of the wanted tensors get the memory of `placing`."""

    def __init__(self, placing: _Placing, wanted: Wanted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._placing = placing
        self._wanted = wanted
        self._placed: set[int] = set()  # identities of storages

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the operator once more, with its shard
        made = None
        if func is torch.ops.aten._to_copy.default:
            made = self._copied(args[0], kwargs)
        elif func is torch.ops.aten.new_zeros.default:
            made = self._zeros(args[0], args[1], kwargs)
        return func(*args, **kwargs) if made is None else made

    def _copied(self, source: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        is_wanted = source.untyped_storage()._cdata in self._wanted
        is_moved = torch.device(kwargs.get("device") or source.device).type == "cpu"
        is_same = kwargs.get("dtype") in (None, source.dtype) and source.is_contiguous()
        if not (is_wanted and is_moved and is_same and source.numel()):
            return None
        copy = self._take(source.shape, source.dtype)
        # Not `non_blocking`: FSDP2 may read the copy at once, to pad it.
        return None if copy is None else copy.copy_(source)

    def _zeros(
        self, like: torch.Tensor, shape: Sequence[int], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        # FSDP2 pads an uneven shard, and keeps the padded tensor.
        is_same = kwargs.get("dtype") in (None, like.dtype)
        is_same = is_same and kwargs.get("device") in (None, like.device)
        if like.untyped_storage()._cdata not in self._placed or not is_same:
            return None
        zeros = self._take(shape, like.dtype)
        return None if zeros is None else zeros.zero_()

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        memory = self._placing.take(math.prod(shape) * dtype.itemsize)
        if memory is None:
            return None
        self._placed.add(memory.untyped_storage()._cdata)
        return memory.view(dtype).view(tuple(shape))
