"""SGLang's own update by broadcast, which our trainers never send: to compare with, to refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sglang_loader.common.broadcast.update_group import backend_of
from support.sglang_server import free_port
from verl_sglang_sync.engine.server_client import SGLangServerClient, operations
from verl_sglang_sync.engine.server_client.operations import UPDATE, Call


@contextmanager
def stock_group(client: SGLangServerClient, name: str, device: torch.device) -> Iterator[Any]:
    """The process group of this process and a server of one rank, as SGLang's users form it."""
    from sglang.srt.utils import init_custom_process_group

    port, backend = free_port(), backend_of(device)
    joined = client.submit(
        operations.init_update_group(
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name=name,
            backend=backend,
        )
    )
    group = init_custom_process_group(
        backend=backend,
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=2,
        rank=0,
        group_name=name,
    )
    joined.result()
    yield group
    left = client.submit(operations.destroy_update_group(name))
    dist.destroy_process_group(group)
    left.result()


def update_from_distributed(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    group_name: str,
    load_format: str | None = None,
    flush_cache: bool = False,
) -> Call:
    """Load tensors that the trainer broadcasts in `group_name`."""
    payload = {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
        "load_format": load_format,
        "flush_cache": flush_cache,
        "weight_version": None,
    }
    return Call(replace(UPDATE, path="update_weights_from_distributed"), payload)
