"""On a real GPU: what a release of the weights loses, and what the host backup brings back.

`native` is SGLang's own backup (host_backup=on), `ours` the hook's (auto).
"""

import asyncio
import json
import re

import pytest
import torch
from tiny_assets import make_assets

from support.http_requests import generate, release, resume
from support.memory_cycles import Memory, free_bytes
from support.memory_loaders import MEMORY_LOADERS, POISON_LOADER, PUBLISH_LOADER
from support.served import served

MIB = 1 << 20
UNCOVERED = ["model.norm.weight"]
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}


class Engine(Memory):
    """A served model, and a trainer of one rank on the same GPU, in this process."""

    def __init__(self, engine):
        super().__init__(engine)
        self.server = engine
        self.trainer = engine.trainer(torch.device("cuda", 0))


@pytest.fixture
def engine(request, tmp_path):
    """A tiny mixture of experts, with our backup unless the parameter is another policy."""
    yield from serve(tmp_path, getattr(request, "param", "auto"))


def serve(folder, policy, *extra):
    """A server on `folder/model`, made where it is missing."""
    extra = ("--log-level", "info", *extra)
    options = {"loaders": MEMORY_LOADERS, "extra": extra, "host_backup": policy}
    with served(folder, architecture="qwen3_moe", device="cuda", **options) as engine:
        yield Engine(engine)
        assert engine.lives, "the engine died"


@pytest.mark.parametrize("engine", ["auto", "on"], indirect=True)
def test_without_a_coverage_every_byte_returns(engine):
    before, text = engine.look(), generate(engine.url)
    for _ in range(3):
        engine.stage(release, "kv_cache", "weights")
        engine.stage(resume, "weights")
        engine.stage(resume, "kv_cache")
        after = engine.look()
        assert after["hashes"] == before["hashes"]
        assert (after["stale"], after["host_bytes"]) == (None, 0)
        assert generate(engine.url) == text
    log = engine.server.log
    assert ("weights backup: saved" in log) == (before["policy"] == "auto")


def test_all_that_a_release_frees_is_in_the_pool(engine):
    """Memory under the tag that did not come from the pool would be lost without a copy."""
    state = engine.look()
    segments = state["allocated"]["segments"]["weights"]
    engine.stage(release, "weights")  # the engine's own copies of buffers find their place
    engine.stage(resume, "weights")
    before = free_bytes()
    engine.stage(release, "weights")
    freed = free_bytes() - before
    engine.stage(resume, "weights")
    assert abs(freed - segments) < 2 * MIB, "2 MiB is the smallest mapping"
    assert 0 < weights_bytes(state) <= segments
    assert engine.look()["hashes"] == state["hashes"]


def test_with_a_coverage_only_the_residue_is_kept(engine):
    before, text = engine.look(), generate(engine.url)
    engine.ask(PUBLISH_LOADER, uncovered=UNCOVERED)
    for _ in range(3):
        engine.stage(release, "kv_cache", "weights")
        engine.stage(resume, "weights")
        engine.ask(POISON_LOADER)
        asleep = engine.look()
        assert "undefined since the last resume" in asleep["stale"]
        assert 0 < asleep["host_bytes"] < weights_bytes(before)
        changed = {n for n, h in before["hashes"].items() if asleep["hashes"][n] != h}
        assert changed, "the poison was not real"
        assert not changed & set(UNCOVERED)
        assert "cos_sin_cache" in " ".join(before["hashes"].keys() - changed)
        status, reason = resume(engine.url, "kv_cache")
        assert (status, "sync the weights first" in reason) == (400, True)
        asyncio.run(engine.trainer.manager("flattened").sync(engine.trainer.weights(), version="v"))
        engine.stage(resume, "kv_cache")
        after = engine.look()
        assert after["hashes"] == before["hashes"]
        assert (after["stale"], after["host_bytes"]) == (None, 0)
        assert generate(engine.url) == text


def test_seconds_host_memory_and_lack_of_room_of_a_larger_model(tmp_path):
    make_assets(tmp_path, architecture="qwen3")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config.pop("layer_types", None)
    path.write_text(json.dumps({**config, **LARGE}))
    for engine in serve(tmp_path, "auto", "--load-format", "dummy"):
        before = engine.look()
        assert weights_bytes(before) > 1 << 30
        full = [engine.stage(release, "weights")[1]]
        taken = torch.empty(max(free_bytes() - 64 * MIB, 0), dtype=torch.uint8, device="cuda")
        status, text = resume(engine.url, "weights")
        del taken
        torch.cuda.empty_cache()
        assert status == 400, "more was mapped than there was room for"
        assert re.search(r"TP rank 0: resume of \['weights'\] refused: it needs \d+ MB", text)
        full.append(engine.stage(resume, "weights")[1])
        middle = engine.look()
        assert middle["hashes"] == before["hashes"]
        engine.ask(PUBLISH_LOADER, uncovered=[])
        seconds = [
            (engine.stage(release, "weights")[1], engine.stage(resume, "weights")[1])
            for _ in range(3)
        ]
        after = engine.look()
        print(f"seconds of (release, resume): all {full}, residue {seconds}")
        residue = before["hashes"].keys() - {
            name for name, value in before["hashes"].items() if after["hashes"][name] != value
        }
        assert any("cos_sin_cache" in name for name in residue)
        assert after["host_bytes"] <= 64 * MIB
        assert after["pinned"] - before["pinned"] <= 64 * MIB
        assert after["rss"] - middle["rss"] <= 64 * MIB
        assert min(a + b for a, b in seconds) < 0.2


def weights_bytes(state):
    """Allocated under the tag `weights`."""
    size = state["allocated"]["weights"][1]
    return size
