"""CPU tensors that other processes map, for a bench or a training on a CPU."""

from __future__ import annotations

from torch.multiprocessing import reductions, set_sharing_strategy


def share_tensors_by_name() -> None:
    """Make this process's CPU tensors mappable by SGLang's scheduler, a process of another tree."""
    # torch's default strategy passes file descriptors, guarded by a key of the process tree. Named
    # shared memory has no such limit.
    set_sharing_strategy("file_system")
    # SGLang's patch of torch's reductions rewrites a tensor's device index, which CPU tensors lack.
    # SGLang leaves torch alone if the attribute exists that marks its patch.
    reductions._reduce_tensor_original = reductions.reduce_tensor  # type: ignore[attr-defined]
