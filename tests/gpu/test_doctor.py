"""The doctor's probes that need a GPU."""

import torch

from verl_sglang_sync.commands.doctor import hardware
from verl_sglang_sync.commands.doctor.check import Status


def test_cuda_ipc_really_works():
    num_gpus = torch.cuda.device_count()
    for check in (*hardware.cuda_ipc_checks(num_gpus), *hardware.nccl_checks(num_gpus)):
        assert check.status is Status.OK, check
