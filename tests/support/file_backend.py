"""A checkpoint engine that brings weights as they arrive, as verl's `nccl` does, without a GPU.

verl imports this module where `checkpoint_engine.custom_backend_module` names it. The trainer's
first rank leaves the weights in a file of the folder that `engine_kwargs.file.folder` names.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

BACKEND = "file"


@CheckpointEngineRegistry.register(BACKEND)
class FileCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Trainer or rollout end.

    Args:
        bucket_size: verl's, not used.
        folder: for the weights.
        is_master: True on the trainer's first rank.
    """

    def __init__(self, bucket_size: int, folder: str, is_master: bool | None = None) -> None:
        self._folder = Path(folder)
        self._is_master = bool(is_master)

    def init_process_group(self, **_: Any) -> None:
        """There is none; nobody needs to know anything of the others."""

    prepare = finalize = init_process_group

    @classmethod
    def build_topology(cls, *_: Any, **__: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Every rank exports, the first writes."""
        named = [(name, tensor.cpu()) for name, tensor in weights]
        if self._is_master:
            part = self._file(global_steps).with_suffix(".part")
            torch.save(named, part)
            part.rename(self._file(global_steps))
        return {}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Wait for the file, then yield what is in it."""
        while not self._file(global_steps).exists():
            await asyncio.sleep(0.05)
        for item in torch.load(self._file(global_steps)):
            yield item

    def _file(self, global_steps: int | None) -> Path:
        return self._folder / f"weights-{global_steps}.pt"
