"""The host backup on real modules whose memory is really lost between save and restore."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_loader.common.engine_settings import HOST_BACKUP_VARIABLE, requested_host_backup
from sglang_loader.common.layout import BucketLayout
from sglang_loader.common.regions.intervals import merge, subtract
from sglang_loader.host_backup.allocations import (
    Allocations,
    bytes_at,
    ranges_in_use,
)
from sglang_loader.host_backup.backup import BRIDGED_BYTES, backup_of, bridged, create_backup
from sglang_loader.host_backup.saved_bytes import CHUNK_BYTES, SavedBytes
from sglang_loader.load_plan.destinations import collect_destinations
from sglang_loader.load_plan.plan import LoadPlan
from support.reachable_memory import publish_coverage, reachable
from unit.released_memory import POISON, Residue, contents, overwrite, poison, size_of, whole

LAYOUT = BucketLayout.pack([("low", (5, 3), torch.bfloat16)])


def sync_completed(model):
    """Why the weights are stale after a complete sync."""
    backup = backup_of(model)
    assert backup is not None
    expected = backup.stale_once_synced
    backup.sync_completed()
    assert backup.stale == expected
    return backup.stale


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Residue()


def release_and_resume(model, backup):
    """Names of the storages that have another content now."""
    before = contents(collect_destinations(model))
    backup.save(model)
    poison(model)
    backup.restore()
    after = contents(collect_destinations(model))
    return {name for name in before if before[name] != after[name]}


def test_a_failed_sync_withdraws_coverage_until_success(model):
    backup = create_backup(model, "auto", reachable)
    publish_coverage(model, whole(model, "linear.weight"))
    backup.sync.begin_bucket(LAYOUT)
    backup.sync_failed()
    assert "not complete" in str(backup.stale)
    assert not release_and_resume(model, backup)
    assert "not complete" in str(backup.stale)
    assert sync_completed(model) is None


def test_a_refused_release_loses_nothing(model):
    backup = create_backup(model, "auto", reachable)
    publish_coverage(model, whole(model, "linear.weight"))
    backup.save(model)
    backup.release_refused()
    assert (backup.stale, backup.host_bytes) == (None, 0)
    backup.restore()  # nothing was released, so this is nothing
    assert backup.stale is None


def test_the_copy_stays_while_the_memory_is_released(model):
    backup = create_backup(model, "auto", reachable)
    before = contents(collect_destinations(model))
    backup.save(model)
    poison(model)
    sync_completed(model)
    publish_coverage(model, whole(model, "linear.bias"))
    backup.restore()
    assert contents(collect_destinations(model)) == before
    assert backup.host_bytes == 0, "the copy is freed once it is back"


def test_a_draft_is_kept_beside_rewritten_targets(model):
    """It is under the same tag, and a sync need not bring it."""
    draft = Residue()
    both = nn.ModuleList([model, draft])
    backup = create_backup(model, "auto", lambda _: reachable(both))
    names = [storage.name for storage in collect_destinations(model).storages]
    publish_coverage(model, whole(model, *names))
    before = contents(collect_destinations(draft))
    backup.save(model)
    assert backup.host_bytes == size_of(draft)
    poison(both)
    backup.restore()
    assert contents(collect_destinations(draft)) == before
    assert f"{size_of(model)} bytes" in str(backup.stale)
    assert sync_completed(model) is None


def test_newly_uncovered_bytes_are_saved(model):
    backup = create_backup(model, "auto", reachable)
    publish_coverage(model, whole(model, "linear.weight", "low"))
    release_and_resume(model, backup)
    model.low.fill_(3)
    publish_coverage(model, whole(model, "low"))
    backup.withdraw("a test")
    assert release_and_resume(model, backup) == set()
    assert f"{model.linear.weight.nbytes} bytes" in str(backup.stale)


def test_without_its_copy_nothing_is_defined(model, monkeypatch):
    backup = create_backup(model, "auto", reachable)
    publish_coverage(model, whole(model, "linear.weight"))
    backup.save(model)
    monkeypatch.setattr(SavedBytes, "restore", mock.Mock(side_effect=RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        backup.restore()
    assert f"{size_of(model)} bytes" in str(backup.stale)
    sync_completed(model)
    assert f"{size_of(model) - model.linear.weight.nbytes} bytes" in str(backup.stale)


def test_on_leaves_the_saving_to_sglang(model):
    backup = create_backup(model, "on", pytest.fail)
    backup.save(model)
    backup.restore()
    assert (backup.stale, backup.host_bytes) == (None, 0)


def test_a_published_coverage_keeps_its_storages_alive(model):
    """Otherwise another tensor could be given an address that is not saved."""
    create_backup(model, "auto", reachable)
    publish_coverage(model, whole(model, "linear.weight", "low"))
    storage = StorageWeakRef(model.low.untyped_storage())
    model.low = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16), requires_grad=False)
    assert not storage.expired()
    backup_of(model).withdraw("a test")
    assert storage.expired()


# Properties.

ranges_of = st.lists(
    st.tuples(st.integers(0, 65), st.integers(0, 65)).map(lambda r: (min(r), max(r))), max_size=6
)


@settings(max_examples=150, deadline=None)
@given(
    coverage=st.lists(ranges_of, min_size=3, max_size=3),
    fails=st.lists(st.booleans(), max_size=4),
    bridge=st.sampled_from((0, 3, BRIDGED_BYTES)),
    chunk=st.sampled_from((1, 3, 64, CHUNK_BYTES)),
    inference=st.booleans(),
)
def test_any_coverage_leaves_right_weights_after_syncs(coverage, fails, bridge, chunk, inference):
    """Uncovered bytes return in every cycle, also where a failed sync has overwritten what the host
    still has a copy of; covered ones are right after each complete sync. The scheduler saves in
    inference mode.
    """
    model = nn.Module()
    for i in range(3):
        model.register_parameter(f"p{i}", nn.Parameter(torch.randn(16 + i), requires_grad=False))
    model.extra = [torch.randn(7)]
    destinations = collect_destinations(model)
    sizes = {s.name: s.nbytes for s in destinations.storages}
    covered = {
        f"p{i}": merge((a, min(b, sizes[f"p{i}"])) for a, b in coverage[i]) for i in range(3)
    }
    backup = create_backup(model, "auto", reachable)
    overwrite(destinations, covered)
    expected = contents(destinations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang_loader.host_backup.backup.BRIDGED_BYTES", bridge)
        patch.setattr("sglang_loader.host_backup.saved_bytes.CHUNK_BYTES", chunk)
        plan = LoadPlan((), covered, destinations)
        backup.leave_out(plan)
        for failed in [*fails, False]:
            with torch.inference_mode(inference):
                release_and_resume(model, backup)
            for name, data in contents(destinations).items():
                for start, stop in subtract([(0, len(data))], covered.get(name, ())):
                    assert data[start:stop] == expected[name][start:stop]
            backup.sync.begin_bucket(LAYOUT)
            if failed:
                for i in range(len(destinations.storages) if backup.host_bytes else 0):
                    destinations.memory[i].fill_(7)
                backup.sync_failed()
                assert backup.stale
                continue
            overwrite(destinations, covered)
            backup.leave_out(plan)
            assert sync_completed(model) is None
    assert contents(destinations) == expected
    assert backup.host_bytes == 0


@given(
    allocated=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=6),
    removed=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=12),
)
def test_bridging_adds_only_allocated_bytes_and_loses_none(allocated, removed):
    memory = tuple(merge((min(r), max(r)) for r in allocated))
    pieces = subtract(memory, [(min(r), max(r)) for r in removed])
    joined = bridged(pieces, memory)
    assert not subtract(pieces, joined)
    assert not subtract(joined, memory)
    assert joined == merge(joined)


# What is allocated.


def test_ranges_in_use_of_a_snapshot():
    segments = [
        {
            "blocks": [
                {"state": "active_allocated", "address": 1000, "size": 512, "requested_size": 400},
                {"state": "inactive", "address": 1512, "size": 512, "requested_size": 512},
                {"state": "active_pending_free", "address": 2024, "size": 8, "requested_size": 8},
            ]
        },
        {"blocks": [{"state": "active_allocated", "address": 1, "size": 2, "requested_size": 2}]},
    ]
    assert merge(ranges_in_use(segments)) == [(1, 3), (1000, 1400), (2024, 2032)]


def test_memory_without_modules_is_saved_by_allocator(model):
    hidden = torch.randn(11)
    span = (hidden.data_ptr(), hidden.data_ptr() + hidden.nbytes)

    def with_hidden(found):
        seen = reachable(found)
        return Allocations(seen.device, tuple(merge([*seen.ranges, span])))

    backup = create_backup(model, "auto", with_hidden)
    publish_coverage(model, whole(model, "linear.weight"))
    expected = hidden.clone()
    backup.save(model)
    bytes_at(hidden.device, *span).fill_(POISON)
    backup.restore()
    assert torch.equal(hidden, expected)


# The policy.


def test_the_setting_is_read_from_the_environment(monkeypatch):
    monkeypatch.delenv(HOST_BACKUP_VARIABLE, raising=False)
    assert requested_host_backup() == "on"
    monkeypatch.setenv(HOST_BACKUP_VARIABLE, "auto")
    assert requested_host_backup() == "auto"
