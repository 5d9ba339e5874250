"""On a real GPU: what a release of the weights loses, and what the host backup brings back.

`native` is SGLang's own backup (host_backup=on), `ours` the hook's (auto).
"""

import re
from contextlib import contextmanager

import pytest
import torch
from tiny_assets import make_assets

from support.enlarged import enlarge
from support.http_requests import generate, release, resume
from support.memory_cycles import Memory, free_bytes
from support.memory_loaders import MEMORY_LOADERS, PUBLISH_LOADER
from support.served import served

MIB = 1 << 20


@contextmanager
def memory_of(folder, policy, *extra):
    """That of a server on `folder/model`, a tiny mixture of experts where there is none."""
    extra = ("--log-level", "info", *extra)
    options = {"loaders": MEMORY_LOADERS, "extra": extra, "host_backup": policy}
    with served(folder, architecture="qwen3_moe", device="cuda", **options) as engine:
        yield Memory(engine)
        assert engine.lives, "the engine died"


@pytest.mark.parametrize("policy", ["auto", "on"])
def test_without_a_coverage_every_byte_returns(policy, tmp_path):
    with memory_of(tmp_path, policy) as memory:
        before, text = memory.look(), generate(memory.url)
        for _ in range(3):
            memory.stage(release, "kv_cache", "weights")
            memory.stage(resume, "weights")
            memory.stage(resume, "kv_cache")
            after = memory.look()
            assert after["hashes"] == before["hashes"]
            assert (after["stale"], after["host_bytes"]) == (None, 0)
            assert generate(memory.url) == text
        assert ("weights backup: saved" in memory.engine.log) == (policy == "auto")


def test_a_larger_models_seconds_and_memory(tmp_path):
    make_assets(tmp_path, architecture="qwen3")
    enlarge(tmp_path / "model", max_position_embeddings=32768)
    with memory_of(tmp_path, "auto", "--load-format", "dummy") as memory:
        before = memory.look()
        assert before["allocated"]["weights"][1] > 1 << 30
        full = [memory.stage(release, "weights")[1]]
        taken = torch.empty(max(free_bytes() - 64 * MIB, 0), dtype=torch.uint8, device="cuda")
        status, text = resume(memory.url, "weights")
        del taken
        torch.cuda.empty_cache()
        assert status == 400, "more was mapped than there was room for"
        assert re.search(r"TP rank 0: resume of \['weights'\] refused: it needs \d+ MB", text)
        full.append(memory.stage(resume, "weights")[1])
        middle = memory.look()
        assert middle["hashes"] == before["hashes"]
        memory.ask(PUBLISH_LOADER)
        seconds = [
            (memory.stage(release, "weights")[1], memory.stage(resume, "weights")[1])
            for _ in range(3)
        ]
        after = memory.look()
        print(f"seconds of (release, resume): all {full}, residue {seconds}")
        residue = before["hashes"].keys() - {
            name for name, value in before["hashes"].items() if after["hashes"][name] != value
        }
        assert any("cos_sin_cache" in name for name in residue)
        assert after["host_bytes"] <= 64 * MIB
        assert after["pinned"] - before["pinned"] <= 64 * MIB
        assert after["rss"] - middle["rss"] <= 64 * MIB
        assert min(a + b for a, b in seconds) < 0.2
