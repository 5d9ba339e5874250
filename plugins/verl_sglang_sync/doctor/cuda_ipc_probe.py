"""Probe: shares one CUDA tensor between two processes, as the weight sync does with its buckets."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.multiprocessing as mp

from verl_sglang_sync.doctor.probe import write_facts

NUM_ELEMENTS = 1 << 20
REPLY_TIMEOUT_S = 120.0


class CudaIpcFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the other process read.

    Attributes:
        expected: sum of the shared tensor's elements.
        received: the same sum, taken by the other process; None if it did not answer.
    """

    expected: int
    received: int | None


def collect() -> CudaIpcFacts:
    """Share a tensor with a spawned process and compare sums."""
    tensor = torch.arange(NUM_ELEMENTS, dtype=torch.int64, device="cuda")
    expected = int(tensor.sum())  # also waits until the tensor is written
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_reply, args=(tensor, sender), daemon=True)
    process.start()
    sender.close()
    received = None
    try:
        if receiver.poll(REPLY_TIMEOUT_S):
            received = int(receiver.recv())
    except EOFError:
        pass  # the other process died; its traceback is on stderr
    finally:
        process.join(timeout=10)
        process.kill()
    return CudaIpcFacts(expected=expected, received=received)


def _reply(tensor: torch.Tensor, sender: Any) -> None:
    sender.send(int(tensor.sum()))


if __name__ == "__main__":
    write_facts(collect())
