"""A stand-in for verl's backend `delta_sharded`, which needs a GPU: deltas go through a file.

verl imports this module where `checkpoint_engine.custom_backend_module` names it. What the rollout
worker yields is in verl's own format, so that verl's own client and loader bring it into SGLang:
first all values, then what has changed since. Unlike verl's it does not round to bfloat16.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.checkpoint_engine.delta_sync.encode import DeltaParam, checksum

from support.file_backend import FileCheckpointEngine

POLL_S = 0.05

# The handles of CPU tensors are opened by SGLang's processes, which are no children of this one.
torch.multiprocessing.set_sharing_strategy("file_system")

Flush = tuple[list[tuple[str, torch.Tensor]], bool]


@CheckpointEngineRegistry.register("delta_sharded")
class DeltaFileCheckpointEngine(FileCheckpointEngine):
    """Trainer or rollout end. Arguments as for `FileCheckpointEngine`."""

    wire_format = "delta_flush"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: dict[str, torch.Tensor] = {}

    async def send_weights(self, engine: Any, global_steps: int | None = None) -> dict[str, float]:
        """Export, and write what has changed; verl passes the training engine itself."""
        weights, _ = engine.get_per_tensor_param()
        flush = self._flush({name: tensor.clone() for name, tensor in weights})
        if self._is_master:
            part = self._file(global_steps).with_suffix(".part")
            torch.save(flush, part)
            part.rename(self._file(global_steps))
        return {}

    def _flush(self, weights: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        positions, values, params = [torch.empty(0, dtype=torch.int32)], [], []
        start = num_values = 0
        for name, tensor in weights.items():
            flat, before = tensor.flatten(), self._sent.get(name)
            changed = slice(None) if before is None else (flat != before.flatten()).nonzero()[:, 0]
            if before is not None:
                positions.append(changed.to(torch.int32))
            values.append(flat[changed])
            end, last = start + 4 * len(positions[-1]), num_values + len(values[-1])
            params.append(
                DeltaParam(
                    name=name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=list(tensor.shape),
                    pos_start=start,
                    pos_end=end,
                    pos_width=4,
                    val_start=num_values,
                    val_end=last,
                )
            )
            start, num_values = end, last
        is_first, self._sent = not self._sent, weights
        places, payload = torch.cat(positions).view(torch.uint8), torch.cat(values)
        spec = {
            "encoding": "dense" if is_first else "indices",
            "params": [vars(param) for param in params],
            "checksum": checksum(places, payload),
        }
        encoded = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
        named = [("__delta_spec__", encoded), ("__values__", payload)]
        return named if is_first else [*named, ("__positions__", places)]

    def receive_weights(self, global_steps: int | None = None) -> Iterator[Flush]:  # type: ignore[override]
        """Wait for the file, then yield it as one flush."""
        while not self._file(global_steps).exists():
            time.sleep(POLL_S)
        yield torch.load(self._file(global_steps)), True
