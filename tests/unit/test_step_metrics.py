"""What a training step's metrics and the log say of its weight syncs."""

import logging
import os
import pwd
from types import SimpleNamespace

import pytest

from sglang_loader.common.session.messages import MAKING_PLAN
from verl_sglang_sync.report import SyncReport, warn_once
from verl_sglang_sync.verl.step_metrics import merged


def report(sync_s, num_eager):
    cost = {"seconds": [0.1, 0.2], "gpu_bytes": [4, 4], "host_bytes": [10**9, 2 * 10**9]}
    return SyncReport(
        mode="compiled",
        replica=0,
        num_buckets=3,
        num_eager=num_eager,
        payload_bytes=4 * 10**9,
        staging_bytes=10**9,
        stages={"release": {"weights": cost}},
        seconds={"open": 0.25, "sync": sync_s},
    )


def test_metrics_are_seconds_gigabytes_and_counts():
    metrics = report(0.5, num_eager=2).metrics()
    assert metrics["weight_sync/open_s"] == 0.25
    assert metrics["weight_sync/gigabytes_per_s"] == 8.0
    assert metrics["weight_sync/host_gigabytes"] == 3.0
    assert metrics["weight_sync/staging_gigabytes"] == 1.0
    assert metrics["weight_sync/num_eager"] == 2


def test_a_sync_without_seconds_has_no_rate():
    assert "weight_sync/gigabytes_per_s" not in SyncReport(mode="compiled", replica=0).metrics()


def test_replicas_are_synced_at_the_same_time():
    found = merged([report(0.5, num_eager=0).metrics(), report(2.0, num_eager=3).metrics()])
    assert found["weight_sync/sync_s"] == 2.0
    assert found["weight_sync/gigabytes"] == 8.0
    assert found["weight_sync/gigabytes_per_s"] == 10.0
    assert found["weight_sync/num_eager"] == 3.0
    assert "weight_sync/proven" not in found


@pytest.mark.parametrize(("others", "proven"), [(True, 1.0), (False, 0.0)])
def test_replicas_are_proven_if_each_of_them_is(others, proven):
    reports = [report(0.5, num_eager=0) for _ in range(2)]
    reports[0].is_proven, reports[1].is_proven = True, others
    assert merged(each.metrics() for each in reports)["weight_sync/proven"] == proven


def test_the_log_line_has_route_and_seconds():
    told = report(0.5, num_eager=1)
    told.num_replayed = told.num_pulled = 2
    told.seconds |= {"release": 0.25, "resume_weights": 0.125, "resume_kv_cache": 0.125}
    assert str(told) == (
        "compiled, replica 0, version None: 4 GB in 0.5 s, 3 buckets, 2 read in the trainer's "
        "memory, 2 replayed, 1 loaded by load_weights, sleep 0.25 s, wake-up 0.25 s"
    )
    assert str(SyncReport(mode="sglang_sync/flattened", replica=None)).startswith(
        "sglang_sync/flattened, version None: 0 GB"
    )


def test_the_log_line_shows_at_verls_default(caplog):
    assert logging.getLogger().level == logging.WARNING, "as verl sets it"
    report(0.5, num_eager=0).write(None)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.text.count("weight sync: compiled, replica 0") == 1


def test_eager_reasons_warn_once_after_first_sync(caplog):
    warn_once.cache_clear()
    for reason in (MAKING_PLAN, "no plan fits", None, "no plan fits", "a cast"):
        told = report(0.5, num_eager=3)
        told.eager_reason = reason
        told.write(None)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    said = [text.rpartition("slower than the load plan: ")[2] for text in warnings]
    assert said == ["no plan fits", "a cast"]


@pytest.mark.parametrize("home", ["~", f"~{pwd.getpwuid(os.geteuid()).pw_name}"])
def test_a_report_file_in_the_home_folder(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    user = SimpleNamespace(pw_dir=str(tmp_path / "home"))
    monkeypatch.setattr(pwd, "getpwnam", lambda _: user)
    monkeypatch.setenv("HOME", user.pw_dir)
    report(0.5, num_eager=0).write(f"{home}/runs/syncs.jsonl")
    assert (tmp_path / "home" / "runs" / "syncs.jsonl").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_an_unknown_users_report_file_is_a_warning(caplog):
    report(0.5, num_eager=0).write("~no_such_user/syncs.jsonl")
    assert "nothing is added to report_file='~no_such_user/syncs.jsonl'" in caplog.text


def test_an_unwritable_report_file_is_a_warning(tmp_path, caplog):
    report(0.5, num_eager=0).write(str(tmp_path))
    assert f"nothing is added to report_file={str(tmp_path)!r}: [Errno 21]" in caplog.text


@pytest.mark.parametrize(("host_bytes", "num_replayed", "warns"), [(3, 2, True), (3, 0, False)])
def test_host_copies_beside_a_plan_are_a_warning(host_bytes, num_replayed, warns, caplog):
    told = SyncReport(mode="compiled", replica=0, num_replayed=num_replayed)
    cost = {"seconds": [0.1], "gpu_bytes": [4], "host_bytes": [host_bytes]}
    told.add_costs("release", {"weights": cost})
    warn_once.cache_clear()
    told.write(None)
    assert ("copies 75% of its weights to the host" in caplog.text) == warns
