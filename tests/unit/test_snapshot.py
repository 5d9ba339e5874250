"""A module whose state is the same is recognised; one whose state is not, never."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl_sglang_sync.sources.snapshot import (
    NUM_TOGETHER,
    SourcesChanged,
    SourcesSnapshot,
    module_state,
)

pytestmark = pytest.mark.usefixtures("world_of_one")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4, bias=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def _keep_metrics(layer):
    layer.norm.register_parameter("bias", layer.norm.weight)
    layer.norm.register_parameter("weight", None)


def make_module():
    module = nn.Sequential(*(Layer() for _ in range(NUM_TOGETHER)), nn.Linear(4, 4, bias=False))
    for layer in module[:-1]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def _train(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)  # as an optimizer: in place
    module[3].cache = torch.zeros(5)  # is not saved


def _unshard(module):
    """FSDP2 leaves its root gathered after a forward pass; taking the state shards it again."""
    module.unshard()


@pytest.mark.parametrize("happens", [_train, _unshard])
def test_without_tensor_changes_the_state_is_unchanged(happens):
    module = make_module()
    snapshot = SourcesSnapshot(module_state(module)())
    happens(module)
    snapshot.require_unchanged(module_state(module)())  # every export brings its own


CHANGES = {
    "another parameter": lambda m: setattr(
        m[1].norm, "weight", nn.Parameter(m[1].norm.weight.detach().clone())
    ),
    "moved data": lambda m: setattr(m[NUM_TOGETHER - 1].scale, "data", m[1].scale.clone()),
    "another storage in the same place": lambda m: setattr(
        m[1], "scale", torch.from_dlpack(m[1].scale)
    ),
    "another dtype": lambda m: setattr(m[1], "scale", m[1].scale.view(torch.int32)),
    "another shape": lambda m: m[1].scale.resize_(1),
    "a buffer more": lambda m: m[2].register_buffer("more", torch.ones(1)),
    "a tensor under another name": lambda m: _keep_metrics(m[2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_state_is_noticed(change):
    module = make_module()
    snapshot = SourcesSnapshot(module_state(module)())
    CHANGES[change](module)
    with pytest.raises(SourcesChanged):
        snapshot.require_unchanged(module_state(module)())


@pytest.mark.parametrize("with_addresses", [True, False])
def test_memory_that_was_freed_in_place_is_noticed(with_addresses):
    tensors = {"weight": torch.ones(8), "bias": torch.ones(1)}
    snapshot = SourcesSnapshot(tensors, with_addresses=with_addresses)
    snapshot.require_unchanged(tensors)
    tensors["weight"].untyped_storage().resize_(0)
    with pytest.raises(SourcesChanged, match=r"^weight is not what"):
        snapshot.require_unchanged(tensors)


def test_an_empty_shard_needs_no_memory():
    buffer, others = torch.ones(8), {"bias": torch.ones(1)}
    snapshot = SourcesSnapshot({"weight": buffer[:0], **others}, with_addresses=False)
    snapshot.require_unchanged({"weight": torch.ones(0), **others})


def test_moved_views_are_noticed_missing_ones_counted():
    buffer = torch.ones(8)
    snapshot = SourcesSnapshot({"weight": buffer[:4], "bias": torch.ones(1)})
    with pytest.raises(SourcesChanged, match="weight"):
        snapshot.require_unchanged({"weight": buffer[4:], "bias": torch.ones(1)})
    with pytest.raises(
        SourcesChanged, match=r"the list of the trainer's tensors \(2 then, 1 now\) is not"
    ):
        snapshot.require_unchanged({"weight": buffer[:4]})


@pytest.mark.parametrize("is_taken", [True, False])
def test_no_storage_inherits_a_freed_ones_identity(is_taken):
    num_reused = 0
    for _ in range(200):
        tensor = torch.ones(1000)
        snapshot = SourcesSnapshot({"weight": tensor}) if is_taken else None
        identity = tensor.untyped_storage()._cdata
        del tensor
        num_reused += torch.ones(1000).untyped_storage()._cdata == identity
        del snapshot
    assert (num_reused == 0) == is_taken, "without the reference it is reused"


def test_held_memory_outlives_its_tensors():
    module = make_module()
    snapshot = SourcesSnapshot(module_state(module)())
    held = snapshot.hold()
    scale, address = module[1].scale, module[1].scale.data_ptr()
    scale.fill_(3)
    module[1].scale = torch.zeros(2)
    del scale
    assert address in [storage.data_ptr() for storage in held]
    [storage] = [storage for storage in held if storage.data_ptr() == address]
    assert torch.tensor([], dtype=torch.float32).set_(storage).tolist() == [3, 3]


def test_a_storage_of_many_tensors_is_held_once():
    buffer = torch.arange(8.0)
    tensors = {str(i): buffer[i : i + 1] for i in range(8)} | {"other": torch.ones(1)}
    snapshot = SourcesSnapshot(tensors)
    addresses = sorted(storage.data_ptr() for storage in snapshot.hold())
    assert addresses == sorted([buffer.data_ptr(), tensors["other"].data_ptr()])
    snapshot.require_unchanged(tensors)
    replaced = tensors | {"7": buffer[7:].clone()}
    with pytest.raises(SourcesChanged, match=r"^7 is not what or where it was"):
        snapshot.require_unchanged(replaced)
    del buffer, tensors, replaced
    with pytest.raises(SourcesChanged, match=r"^0 is not where it was"):
        snapshot.hold()


def test_freed_memory_cannot_be_held():
    module = make_module()
    snapshot = SourcesSnapshot(module_state(module)())
    without_addresses = SourcesSnapshot(module_state(module)(), with_addresses=False)
    module[1].scale = torch.zeros(2)
    with pytest.raises(SourcesChanged, match=r"1\.scale is not where it was"):
        snapshot.hold()
    assert without_addresses.hold() == []


def _sharded(placement, mesh=None, shape=(4, 4)):
    """A tensor whose local part is the same in all cases."""
    mesh = mesh or init_device_mesh("cpu", (1,))
    placements = [placement] * mesh.ndim
    stride = (shape[1], 1)
    return DTensor.from_local(
        LOCAL, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


LOCAL = torch.ones(4, 4)

OTHERS = {
    "placement": lambda: _sharded(Replicate()),
    "another dimension": lambda: _sharded(Shard(1)),
    "mesh": lambda: _sharded(Shard(0), init_device_mesh("cpu", (1, 1))),
    "whole shape": lambda: _sharded(Shard(0), shape=(8, 4)),
    "not sharded": lambda: LOCAL,
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("with_addresses", [True, False])
def test_the_same_memory_sharded_otherwise_is_noticed(other, with_addresses):
    snapshot = SourcesSnapshot({"weight": _sharded(Shard(0))}, with_addresses=with_addresses)
    snapshot.require_unchanged({"weight": _sharded(Shard(0))})
    with pytest.raises(SourcesChanged, match="weight"):
        snapshot.require_unchanged({"weight": OTHERS[other]()})
