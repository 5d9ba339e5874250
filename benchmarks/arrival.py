"""Proof that an engine holds the trainer's weights: checksums of both, taken where they live.

SGLang fuses what the trainer exports apart (q, k and v; gate and up; all experts of a layer) but
keeps every element's bits. So the elements of a layer's attention, of its MLP and of each norm are
compared as multisets: a sum over the elements of a polynomial of their bits. It tells new weights
from old ones; that every element is also in its place is what the tests show.

Each TP rank sums its own part of each tensor, and the parts' sums add up to the trainer's. A tensor
that every rank has whole counts once: its sums are equal. So a part that one rank has twice, or in
another's stead, is missed.

    server = engine_server(..., loaders=(ARRIVAL_LOADER,), environment=arrival_environment(folder))
    advance(weights)                     # before a sync: every element changes, by one bit pattern
    assert engine_checksums(client, folder, tp) == checksums(weights)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

ARRIVAL_LOADER = "benchmarks.arrival.write_checksums"
FOLDER_VARIABLE = "BENCHMARK_ARRIVAL_FOLDER"
CHUNK = 1 << 24  # elements summed at a time
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def arrival_environment(folder: Path) -> dict[str, str]:
    """What the engine's processes need to run `write_checksums`."""
    return {FOLDER_VARIABLE: str(folder)}


def advance(weights: NamedTensors) -> None:
    """Change every element: its bit pattern goes up by one."""
    torch._foreach_add_([_bits(tensor) for _, tensor in weights], 1)


def group_of(name: str) -> str:
    """`model.layers.3.mlp.experts.7.up_proj.weight` -> `model.layers.3.mlp`."""
    return ".".join(name.split(".")[:4])


def checksums(weights: NamedTensors, key_of: Callable[[str], str] = group_of) -> dict[str, int]:
    """Sum of each group of tensors, as a signed number of 64 bits."""
    sums: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        key = key_of(name)
        if key not in sums:
            sums[key] = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for part in _bits(tensor.detach()).split(CHUNK):
            x = part.to(torch.int64)
            sums[key] += (x * (x + 7919) * (x + 104729)).sum()  # modulo 2**64
    values = torch.stack(list(sums.values())).tolist()
    return dict(zip(sums, values, strict=True))


def engine_checksums(client: Any, folder: Path, tp: int = 1) -> dict[str, int]:
    """Have the engine's ranks sum their own tensors; `client` is a `SGLangServerClient`.

    Args:
        folder: that of `arrival_environment`.
        tp: tensor-parallel ranks; where they are more than the model's KV heads, its attention is
            not recognised.
    """
    from multiprocessing.reduction import ForkingPickler

    from verl_sglang_sync.engine.server_client import operations

    files = [folder / f"{rank}.json" for rank in range(tp)]
    for file in files:
        file.unlink(missing_ok=True)
    nothing = [bytes(ForkingPickler.dumps([]))] * tp
    client.run(operations.update_weights(nothing, load_format=ARRIVAL_LOADER))
    return merged([json.loads(file.read_text()) for file in files])


def merged(ranks: Sequence[dict[str, int]]) -> dict[str, int]:
    """Sum of each group, from the sums of each rank's tensors."""
    sums: dict[str, int] = {}
    for name in ranks[0]:
        group = group_of(name)
        sums[group] = sums.get(group, 0) + sum({rank[name] for rank in ranks})
    return {group: (value + 2**63) % 2**64 - 2**63 for group, value in sums.items()}


def write_checksums(model: Any, _named_tensors: Any) -> None:
    """SGLang custom weight loader that loads nothing; runs in each rank of the engine."""
    with torch.no_grad():
        sums = checksums(model.state_dict().items(), key_of=str)
    file = Path(os.environ[FOLDER_VARIABLE], f"{torch.distributed.get_rank()}.json")
    file.write_text(json.dumps(sums))


def difference(trainer: dict[str, int], engine: dict[str, int]) -> list[str]:
    """The trainer's groups that the engine does not hold."""
    return [name for name, value in trainer.items() if engine.get(name) != value]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(INTEGERS[tensor.element_size()])
