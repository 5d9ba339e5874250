"""Offloaded parameters: verl's own offload, in host memory that engines map. Four ranks on gloo."""

import gc
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_loader.common.host_memory import HostFile
from sglang_loader.common.session import messages
from sglang_loader.common.shared_memory import CannotMap, map_buffer
from sglang_loader.session.mapped_memory import MappedMemory
from unit import route_ranks
from unit.route_ranks import Rank, export_of, local_of, sharded
from verl_sglang_sync.sources import host_memory
from verl_sglang_sync.sources.export_trace import NotTraceable, trace_export

CPU = torch.device("cpu")
NBYTES = 8192


def offload(model):
    """What verl's engine does after a training step."""
    from verl.workers.engine.fsdp import transformer_impl

    transformer_impl.offload_fsdp_model_to_cpu(model, empty_cache=False)


def reload(model):
    """As before a training step: other memory, here of the host as well."""
    handles = getattr(model, "_all_handles", None)
    with torch.no_grad():
        if handles is None:
            model._apply(torch.clone)
        for handle in handles or ():
            handle.flat_param_to(CPU, copy=True)
            handle.flat_param._local_shard = handle.flat_param.data


def addresses(model):
    """Of this rank's shards; one of four ranks has nothing of some parameters."""
    locals_ = [local_of(parameter) for parameter in model.parameters()]
    return [local.data_ptr() for local in locals_ if local.numel()]


def is_placed(tensor):
    # Not imported by name: a rank gets this module by value.
    return host_memory.HOST_MEMORY.file_of(tensor.data_ptr()) is not None


def are_placed(model):
    locals_ = [local_of(parameter) for parameter in model.parameters()]
    return [is_placed(local) for local in locals_ if local.numel()]


def values(model):
    return [local_of(parameter).detach().clone() for parameter in model.parameters()]


def are_equal(some, others):
    return all(map(torch.equal, some, others))


class OffloadedRank(Rank):
    """A rank whose parameters verl offloads. It makes a new export for each sync, as verl does."""

    def __init__(self, **options):
        from verl.workers.engine.fsdp import transformer_impl

        from verl_sglang_sync.verl.offload import place_offloaded_parameters

        transformer_impl.get_torch_device = lambda: mock.Mock()
        place_offloaded_parameters(CPU)
        host_memory.HOST_MEMORY._places.clear()  # of earlier tests
        super().__init__("pull", is_shared=False, is_offloaded=True, **options)
        self._where = []

    def sync(self):
        self.export = export_of(self.model, is_offloaded=True)
        super().sync()
        self.seen.keeps = self.seen.report.get("host_memory_bytes")

    def train(self):
        self._has_stepped, self.export = True, None  # verl drops it, which lists offloaded tensors
        reload(self.model)
        assert not any(are_placed(self.model)), "the control"
        self.step()
        before = values(self.model)
        offload(self.model)
        assert are_equal(values(self.model), before)
        assert all(are_placed(self.model))
        self._where.append((host_memory.HOST_MEMORY.nbytes, addresses(self.model)))

    def check_places(self):
        first, second, third = self._where
        assert second == third, "the places of the last offload were free"
        assert first[0] == third[0], "no more memory"

    def hold(self):
        """Somebody keeps the tensors of one offload, such as a checkpoint that is being saved."""
        self._held = [local_of(p).detach() for p in self.model.parameters()]
        self._copies = values(self.model)

    def check_held(self):
        assert are_equal(self._held, self._copies)

    def grow_short(self):
        """From now on there is no memory for files of host memory, and none is kept."""
        host_memory._available_bytes = lambda: 0
        host_memory.HOST_MEMORY._places.clear()

    def recover(self):
        host_memory._available_bytes = AVAILABLE


AVAILABLE = host_memory._available_bytes


def play(pool, *steps, kind="moe", **options):
    return route_ranks.play(pool, OffloadedRank, {"kind": kind, **options}, *steps)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_offloaded_parameters_are_pulled(pool, kind, strategy):
    steps = ["sync", *["train", "sync"] * 3, "check_places"]
    for seen in play(pool, *steps, kind=kind, strategy=strategy):
        assert seen["routes"] == ["export", *["pull"] * 3]
        assert seen["num_exports"] == [1]
        assert seen["recoveries"] == [] and seen["state"] == "PROVEN"
        assert seen["keeps"] > 0, "the report says how much is pinned"


def test_kept_tensors_of_an_offload_stay_unchanged(pool):
    steps = ["sync", "train", "sync", "hold", "train", "sync", "check_held", "train", "sync"]
    for seen in play(pool, *steps, kind="dense"):
        assert seen["routes"] == ["export", "pull", "pull", "pull"]


def test_too_little_host_memory_exports_with_reason(pool):
    steps = ["grow_short", "sync", "step", "sync", "recover", *["step", "sync"] * 3]
    for seen in play(pool, *steps, kind="dense"):
        assert seen["routes"] == [*["export"] * 4, "pull"], "after one sync, then after two"


def _offloads_unevenly():
    """Offload a model of which no parameter divides by the ranks; return what was seen."""
    from verl_sglang_sync.verl import offload as hook

    hook.place_offloaded_parameters(CPU)
    host_memory.HOST_MEMORY._places.clear()
    model = sharded("dense")
    identities, before = list(map(id, model.parameters())), values(model)
    offload(model)
    assert not any(are_placed(model)), "nobody exports it"
    hook._exported.add(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    offload(model)
    first = addresses(model)
    seen = [
        list(map(id, model.parameters())) == identities,
        are_equal(values(model), before),
        all(are_placed(model)),
        not any(is_placed(local_of(parameter.grad)) for parameter in model.parameters()),
    ]
    size = host_memory.HOST_MEMORY.nbytes
    for _ in range(3):
        reload(model)
        offload(model)
    seen += [addresses(model) == first, host_memory.HOST_MEMORY.nbytes == size]
    # FSDP gathers from its own reference to the padded shard.
    model.unshard()
    whole = [p.detach().clone() for p in model.parameters(recurse=False)]
    model.reshard()
    seen.append(all(tensor.isfinite().all() for tensor in whole))
    return seen


def test_verls_offload_keeps_parameters_as_they_are(pool):
    for seen in pool.run(_offloads_unevenly):
        assert seen == [True] * len(seen)


def test_placing_frees_what_was_copied():
    tensor = torch.ones(1000)
    storage = StorageWeakRef(tensor.untyped_storage())
    with host_memory.HOST_MEMORY.placing([tensor], CPU):
        tensor = tensor.to("cpu")
        assert storage.expired(), "a GPU's memory would stay in torch's cache"
    assert host_memory.HOST_MEMORY.file_of(tensor.data_ptr()) is not None and (tensor == 1).all()


def test_a_trace_follows_moves_of_offloaded_shards(world_of_one):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    private = DTensor.from_local(torch.ones(4, 4), mesh)
    with host_memory.HOST_MEMORY.placing([private], torch.device("cpu")):
        placed = private.to("cpu")
    moving = torch.device("meta")  # stands for the engine's GPU

    def trace(parameter):
        def export():
            yield "w", parameter.to(moving, non_blocking=True).full_tensor()

        return trace_export(
            export(), sources={"w": parameter}.copy, world_size=1, device=moving
        ).tensors

    assert trace(placed)["w"].shape == (4, 4)
    with pytest.raises(NotTraceable, match="are offloaded"):
        trace(private)


def test_a_file_shows_what_its_owner_writes():
    file = HostFile(NBYTES, CPU)
    mapped = map_buffer(file.handle, CPU)
    file.view[-1] = 7
    assert mapped.numel() == NBYTES and mapped[-1] == 7
    handle = file.handle
    del file
    assert mapped[-1] == 7, "mapped memory outlives its file"
    with pytest.raises(CannotMap):
        map_buffer(handle, CPU)


def test_one_session_without_a_file_unmaps_none():
    """Such as a proof by export. Pinning a file takes seconds."""
    file, mapped = HostFile(4096, CPU), MappedMemory()
    with_file = [messages.SharedBuffer(slot=0, name=file.name, handle=file.handle, keep=True)]
    sessions = ([], with_file, [], with_file, [], [])
    names = []
    for buffers in sessions:
        mapped.begin_session(CPU)
        mapped.map_buffers(buffers)
        mapped.release()
        names.append(mapped.names)
    own = [file.name]
    assert names == [[], own, own, own, own, []]
    mapped.map_buffers(with_file)
    mapped.release_all()
    assert mapped.names == []


def test_another_file_of_that_number_is_refused():
    file = HostFile(NBYTES, CPU)
    other = HostFile(NBYTES, CPU)
    handle = msgspec.structs.replace(file.handle, descriptor=other.handle.descriptor)
    with pytest.raises(CannotMap, match="no longer"):
        map_buffer(handle, CPU)
    handle = msgspec.structs.replace(file.handle, nbytes=NBYTES - 1)
    with pytest.raises(CannotMap, match="expected"):
        map_buffer(handle, CPU)


OWNER = """
import sys, torch, msgspec
from sglang_loader.common.host_memory import HostFile
file = HostFile(8192, torch.device("cpu"))
file.view.fill_(5)
print(msgspec.json.encode(file.handle).decode(), flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_killed_owner():
    from sglang_loader.common.host_memory import HostHandle

    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    handle = msgspec.json.decode(owner.stdout.readline(), type=HostHandle)
    mapped = map_buffer(handle, CPU)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert (mapped == 5).all()
    assert not [file for file in Path("/dev/shm").iterdir() if handle.name in file.name]
    assert handle.name in Path("/proc/self/maps").read_text()
    with pytest.raises(CannotMap):
        map_buffer(handle, CPU)
    del mapped
    gc.collect()
    assert handle.name not in Path("/proc/self/maps").read_text()
