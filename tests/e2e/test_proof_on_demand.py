"""`verl-sglang-sync prove`: a real server, real trainer ranks, and a way that breaks after it was
proven.
"""

import json
import subprocess
import sys
import time

import pytest

from support.exports import KeptExport
from support.served import served
from support.trainer import report_of_cycle
from unit.planted_faults import swapped
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.server_client.client import SGLangServerClient

pytestmark = pytest.mark.e2e

KEY = "secret"
COMMAND = [sys.executable, "-c", "from verl_sglang_sync.commands.cli import app; app()", "prove"]
LIMIT_S = 120


def begin(rank, url):
    rank.use_client(url, timeout_s=60, admin_api_key=KEY)
    rank.kept["manager"], rank.kept["export"] = rank.manager("compiled"), KeptExport(rank.weights())


def sync(rank, scale):
    export = rank.kept["export"]
    export.write(rank.weights(scale))
    return report_of_cycle(rank.kept["manager"], export.reexport(), str(scale))


def swap_pieces(rank):
    """From now on rank 0's map has two tensors of one size in each other's place."""
    import msgspec

    from sglang_loader.common.weight_map import _decoder, _encoder
    from verl_sglang_sync.engine.session import StoredBytes, TrainerSession

    load_shards = TrainerSession.load_shards

    def planted(session, weight_map, bases, **options):
        decoded = _decoder.decode(weight_map.data)
        buckets = [
            msgspec.structs.replace(bucket, pieces=swapped(bucket.pieces))
            for bucket in decoded.buckets
        ]
        changed = _encoder.encode(msgspec.structs.replace(decoded, buckets=buckets))
        assert changed != weight_map.data
        load_shards(session, StoredBytes.of(changed), bases, **options)

    if rank.rank == 0:
        TrainerSession.load_shards = planted


def prove(engine, *options):
    arguments = [*COMMAND, engine.url, "--json", *options]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def outcome(process):
    """The command's exit status, and what it has printed."""
    printed, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, json.loads(printed)


def last_proof(engine):
    client = SGLangServerClient(engine.url, timeout_s=60, **engine.access)
    return client.run(operations.last_proof())


def wait_until_asked(engine):
    deadline = time.monotonic() + LIMIT_S
    while not last_proof(engine)["requested"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_proof_on_demand_finds_a_broken_route(tmp_path):
    access, key = {"admin_api_key": KEY}, ("--admin-api-key", KEY)
    options = {"extra": key, "access": access, "architecture": "qwen3_moe"}
    with served(tmp_path, tp=2, **options) as engine, engine.ranks() as ranks:
        reference = engine.hashes()
        assert last_proof(engine)["number"] == 0
        ranks.run(begin, engine.url)
        assert [r["is_proven"] for r in ranks.run(sync, 0.5)] == [True, True]
        first = last_proof(engine)
        assert (first["number"], first["is_proven"], first["weight_version"]) == (1, True, "0.5")
        ranks.run(sync, 0.25)  # which is proven again if tensors are alike

        status, refused = outcome(prove(engine))
        assert status == 2 and "--admin-api-key" in refused["text"]
        assert not last_proof(engine)["requested"]
        status, none = outcome(prove(engine, *key, "--timeout-s", "0.1"))
        assert status == 2 and "no sync was proven within 0.1 s" in none["text"]
        assert [r["is_proven"] for r in ranks.run(sync, 0.5)] == [True, True], "the wish stayed"
        number = last_proof(engine)["number"]

        command = prove(engine, *key)
        wait_until_asked(engine)
        reports = ranks.run(sync, 1.0)
        assert all(r["is_proven"] and r["num_pulled"] == r["num_buckets"] for r in reports)
        status, good = outcome(command)
        assert (status, good["number"], good["weight_version"]) == (0, number + 1, "1.0"), good
        assert engine.hashes() == reference

        ranks.run(swap_pieces)
        for report in ranks.run(sync, 1.0):
            assert report["is_proven"] is None, "one wish, one proof"
            assert report["num_pulled"] == report["num_buckets"]
        wrong = [
            name
            for had, has in zip(reference, engine.hashes(), strict=True)
            for name in had
            if had[name] != has[name]
        ]
        assert wrong, "the control: nobody notices"

        command = prove(engine, *key)
        wait_until_asked(engine)
        assert [r["is_proven"] for r in ranks.run(sync, 1.0)] == [False, False]
        status, bad = outcome(command)
        assert (status, bad["number"], bad["requested"]) == (1, number + 2, False), bad
        assert set(bad["differing"]) == set(wrong)
        assert engine.hashes() == reference, "the export has brought the right ones"
        for report in ranks.run(sync, 1.0):
            assert report["num_pulled"] == 0, "by the export from then on"
        assert engine.hashes() == reference and engine.lives
