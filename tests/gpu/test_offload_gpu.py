"""On a GPU: it reads pinned host memory of another process, to which verl's offload copies."""

import gc
import subprocess
import sys

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from sglang_loader.common.copies.fused import FusedCopies
from sglang_loader.common.host_memory import CannotPin, HostFile, HostHandle, on_device
from sglang_loader.common.regions.geometry import StridedCopy
from sglang_loader.common.shared_memory import map_buffer
from unit.route_ranks import local_of
from verl_sglang_sync.sources.host_memory import HOST_MEMORY

NBYTES = 64 << 20
ROW, PART = 8192, 4096
"""Bytes of a row, and of the part of each row that a TP rank reads."""

OWNER = f"""
import sys, torch, msgspec
from sglang_loader.common.host_memory import HostFile
torch.manual_seed(5)
file = HostFile({NBYTES}, torch.device("cpu"))
file.view.view(torch.int64).random_()
print(msgspec.json.encode(file.handle).decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def shared(device):
    """Memory of another process's host file, and the bytes that are in it."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    handle = msgspec.json.decode(owner.stdout.readline(), type=HostHandle)
    torch.manual_seed(5)
    yield (
        map_buffer(handle, device),
        torch.empty(NBYTES // 8, dtype=torch.int64).random_().view(torch.uint8),
    )
    owner.communicate()


def test_a_gpu_reads_another_processs_host_memory(shared, device):
    mapped, expected = shared
    before = torch.cuda.memory_allocated()
    assert mapped.device == device
    rows = NBYTES // ROW
    parts = StridedCopy(0, PART, 0, ((rows, ROW, PART),), PART)
    dense = StridedCopy(1, 0, 0, (), NBYTES)
    odd = StridedCopy(1, 3, NBYTES, (), 5)  # no whole words: torch copies it
    targets = [
        torch.zeros(rows * PART, dtype=torch.uint8, device=device),
        torch.zeros(NBYTES + 8, dtype=torch.uint8, device=device),
    ]
    copies = FusedCopies([(copy, 0) for copy in (parts, dense, odd)])
    for launch in copies.between({0: mapped}, targets, device):
        launch()
    taken = expected.view(rows, ROW)[:, PART:].flatten()
    assert torch.equal(targets[0].cpu(), taken)
    assert torch.equal(targets[1][:NBYTES].cpu(), expected)
    assert torch.equal(targets[1][NBYTES : NBYTES + 5].cpu(), expected[3:8])
    cast = torch.zeros(NBYTES // 4, dtype=torch.bfloat16, device=device)
    cast.copy_(mapped.view(torch.float32))
    assert torch.equal(
        cast.view(torch.int16).cpu(),
        expected.view(torch.float32).to(device).bfloat16().view(torch.int16).cpu(),
    )
    own = sum(t.nbytes for t in targets) + cast.nbytes
    assert torch.cuda.memory_allocated() - before < own + (8 << 20), "nothing is staged"


def test_a_refused_pin_leaves_cuda_working(device):
    file = HostFile(NBYTES, device)
    memory = torch.frombuffer(file.buffer, dtype=torch.uint8)
    with pytest.raises(CannotPin, match="cannot pin"):
        on_device(memory, device)  # it is pinned already
    assert torch.ones(4, device=device).sum() == 4
    del file.view
    view = on_device(memory, device)  # unpinned with the first view
    memory[-1] = 9
    assert view[-1] == 9


@pytest.fixture
def nccl_of_one():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_training_with_placed_parameters_is_the_same(strategy, device, nccl_of_one):
    from verl.workers.engine.fsdp import transformer_impl

    from verl_sglang_sync.verl import offload as hook

    hook.place_offloaded_parameters(device)

    def train(is_placed):
        gc.collect()  # a model that was trained before
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 65537), torch.nn.ReLU(), torch.nn.Linear(65537, 32)
        model = torch.nn.Sequential(*layers).to(device)
        if strategy == "fsdp2":
            model = fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        else:
            model = FullyShardedDataParallel(model, device_id=device)
        if is_placed:
            hook._exported.add(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch, places = torch.randn(16, 64, device=device), []
        for _ in range(4):
            transformer_impl.load_fsdp_model_to_gpu(model)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            transformer_impl.offload_fsdp_model_to_cpu(model)
            torch.cuda.synchronize()
            places.append([local_of(p).data_ptr() for p in model.parameters()])
        left = torch.cuda.memory_allocated() - before
        return [local_of(p).detach() for p in model.parameters()], places, left

    own, _, left_by_own = train(False)
    placed, places, left = train(True)
    assert left <= left_by_own + (1 << 20), "offloading has freed the GPU's memory"
    assert all(map(torch.equal, placed, own))
    assert places[1] == places[-1], "the same memory after each step"
    assert all(HOST_MEMORY.file_of(address) is not None for address in places[-1])
    assert all(tensor.is_pinned() for tensor in placed), "verl's copies are asynchronous"
    assert HOST_MEMORY.file_of(own[0].data_ptr()) is None
