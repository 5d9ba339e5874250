"""The doctor's probes that need a GPU."""

from __future__ import annotations

import pytest
import torch

from verl_sglang_sync.doctor import hardware
from verl_sglang_sync.doctor.check import Status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


def test_cuda_ipc_and_memory_saver_really_work() -> None:
    machine = hardware.look_at_machine()
    for check in (
        hardware.gpu_check(machine),
        hardware.cuda_ipc_check(machine),
        hardware.memory_saver_check(machine),
        hardware.nccl_check(machine),
    ):
        assert check.status is Status.OK, check
