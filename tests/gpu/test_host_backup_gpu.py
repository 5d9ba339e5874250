"""On a real GPU: what a release of the weights loses, and what the host backup brings back.

`native` is SGLang's own backup (host_backup=on), `ours` the hook's (auto).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_assets import make_assets

from sglang_loader.common.engine_settings import HostBackup
from support.backup_steps import engine_state, occupy, poison, publish
from support.coverage_loader import COVERAGE_LOADERS
from support.engine_steps import sync_weights
from support.http_requests import generate, release, resume
from support.sglang_server import Server, sglang_server
from support.trainer import LoneTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: memory saver"),
]

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


class Engine:
    """A server, and steps of a trainer on the same GPU."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.url = server.url
        self.log = server.log
        self.folder = folder
        self.model = str(folder / "model")
        self._trainer = LoneTrainer(server.url, torch.device("cuda", 0))

    def step(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a step of the trainer; its result."""
        return function(self._trainer, *arguments)

    def state(self) -> dict[str, Any]:
        """Hashes and sizes in the engine."""
        state: dict[str, Any] = self.step(engine_state, str(self.folder / "state.json"))
        return state

    def stage(self, stage: Callable[..., tuple[int, str]], *tags: str) -> float:
        """Go through a stage; its seconds."""
        started = time.perf_counter()
        status, text = stage(self.url, *tags)
        seconds = time.perf_counter() - started
        assert status == 200, text
        return seconds


@pytest.fixture(params=["auto", "on"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A tiny mixture of experts under each policy."""
    yield from serve(tmp_path, request.param)


@pytest.fixture
def auto_engine(tmp_path: Path) -> Iterator[Engine]:
    """A tiny mixture of experts with our backup."""
    yield from serve(tmp_path, "auto")


def serve(folder: Path, policy: HostBackup, *extra: str) -> Iterator[Engine]:
    """A server on `folder/model`, made where it is missing."""
    if not (folder / "model").exists():
        make_assets(folder, architecture="qwen3_moe")
    with sglang_server(
        folder / "model",
        folder,
        device="cuda",
        loaders=COVERAGE_LOADERS,
        extra=("--log-level", "info", *extra),
        host_backup=policy,
    ) as server:
        yield Engine(server, folder)
        assert server.process.poll() is None, "the engine died"


def free_bytes() -> int:
    """Free memory of the GPU, all processes together."""
    return torch.cuda.mem_get_info()[0]


def test_without_a_coverage_every_byte_returns(engine: Engine) -> None:
    before, text = engine.state(), generate(engine.url)
    for _ in range(3):
        engine.stage(release, "kv_cache", "weights")
        engine.stage(resume, "weights")
        engine.stage(resume, "kv_cache")
        after = engine.state()
        assert after["hashes"] == before["hashes"]
        assert (after["stale"], after["host_bytes"]) == (None, 0)
        assert generate(engine.url) == text
    log = engine.log.read_text(errors="replace")
    assert ("weights backup: saved" in log) == (before["policy"] == "auto")


def test_all_that_a_release_frees_is_in_the_pool(auto_engine: Engine) -> None:
    """Memory under the tag that did not come from the pool would be lost without a copy."""
    state = auto_engine.state()
    auto_engine.stage(release, "weights")  # the engine's own copies of buffers find their place
    auto_engine.stage(resume, "weights")
    before = free_bytes()
    auto_engine.stage(release, "weights")
    freed = free_bytes() - before
    auto_engine.stage(resume, "weights")
    assert abs(freed - state["segment_bytes"]) < 2 * MIB, "2 MiB is the smallest mapping"
    assert 0 < state["weights_bytes"] <= state["segment_bytes"]
    assert auto_engine.state()["hashes"] == state["hashes"]


def test_with_a_coverage_only_the_residue_is_kept(auto_engine: Engine) -> None:
    engine = auto_engine
    before, text = engine.state(), generate(engine.url)
    engine.step(publish, UNCOVERED)
    for _ in range(3):
        engine.stage(release, "kv_cache", "weights")
        engine.stage(resume, "weights")
        engine.step(poison, UNCOVERED)
        asleep = engine.state()
        assert "undefined since the last resume" in asleep["stale"]
        assert 0 < asleep["host_bytes"] < before["weights_bytes"]
        changed = {n for n, h in before["hashes"].items() if asleep["hashes"][n] != h}
        assert changed, "the poison was not real"
        assert not changed & set(UNCOVERED)
        assert "cos_sin_cache" in " ".join(before["hashes"].keys() - changed)
        status, reason = resume(engine.url, "kv_cache")
        assert (status, "sync the weights first" in reason) == (400, True)
        engine.step(sync_weights, engine.model)
        engine.stage(resume, "kv_cache")
        after = engine.state()
        assert after["hashes"] == before["hashes"]
        assert (after["stale"], after["host_bytes"]) == (None, 0)
        assert generate(engine.url) == text


def test_seconds_host_memory_and_lack_of_room_of_a_larger_model(tmp_path: Path) -> None:
    make_assets(tmp_path, architecture="qwen3")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config.pop("layer_types", None)
    path.write_text(json.dumps({**config, **LARGE}))
    for engine in serve(tmp_path, "auto", "--load-format", "dummy"):
        before = engine.state()
        assert before["weights_bytes"] > 1 << 30
        full = [engine.stage(release, "weights")]
        status, text = engine.step(occupy, engine.url, 64 * MIB)
        assert status == 400, "more was mapped than there was room for"
        assert re.search(r"TP rank 0: resume of \['weights'\] refused: it needs \d+ MB", text)
        full.append(engine.stage(resume, "weights"))
        middle = engine.state()
        assert middle["hashes"] == before["hashes"]
        engine.step(publish, [])
        seconds = [
            (engine.stage(release, "weights"), engine.stage(resume, "weights")) for _ in range(3)
        ]
        after = engine.state()
        print(f"full {full}, residue {seconds}, before {_sizes(before)}, after {_sizes(after)}")
        residue = before["hashes"].keys() - {
            name for name, value in before["hashes"].items() if after["hashes"][name] != value
        }
        assert any("cos_sin_cache" in name for name in residue)
        assert after["host_bytes"] <= 64 * MIB
        assert after["pinned"] - before["pinned"] <= 64 * MIB
        assert after["rss"] - middle["rss"] <= 64 * MIB
        assert min(a + b for a, b in seconds) < 0.2


def _sizes(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "hashes"}
