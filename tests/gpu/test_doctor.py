"""The doctor's probes that need a GPU."""

from verl_sglang_sync.commands.doctor import hardware
from verl_sglang_sync.commands.doctor.check import Status, run_probe


def test_cuda_ipc_really_works():
    gpus = hardware.visible_gpus()
    for check in (
        hardware.cuda_ipc_check(gpus, run_probe(hardware.probe_cuda_ipc)),
        hardware.nccl_check(gpus),
    ):
        assert check.status is Status.OK, check
