"""Sleeps, wake-ups and syncs of unchanged weights, by a trainer in this process, and what must hold
of everything that they leave, on a CPU as on a GPU.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from support.http_requests import Reply, generate, release, resume
from support.memory_loaders import (
    LOOK_LOADER,
    MEMORY_LOADERS,
    POISON_LOADER,
    STRAY_BYTES,
    STRAY_LOADER,
)
from support.served import Served, served
from support.served_models import checkpoint_weights, make_model
from verl_sglang_sync.preflight import makes_breakable_graphs

CYCLE_MODELS = {
    "qwen3": "dense",
    "qwen3-moe": "mixture of experts",
    "deepseek-v2": "MLA, whose w_kc and w_vc are derived; mixture of experts",
    "qwen2_5-vl": "vision and language",
    "gemma2": "a derived buffer, weight + 1",
}
MIXTURES_OF_EXPERTS = ("qwen3-moe", "deepseek-v2")
ALL_TAGS = ("kv_cache", "cuda_graph", "weights")
LOOK_EVERY = 10
GRAPHS_UNDER_THE_TAG = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}
SAME = ("hashes", "addresses", "nan", "allocated")
CLEAN = (None, 0)
"""`stale` and `host_bytes` of an engine that lacks nothing and keeps nothing."""


class Memory:
    """A server's memory, seen and changed from within by `memory_loaders`, and by its stages."""

    def __init__(self, engine: Served) -> None:
        self.engine, self.url = engine, engine.url

    def ask(self, loader: str, **argument: Any) -> Any:
        """Have the engine run one of `memory_loaders`; its answer."""
        file = self.engine.folder / "answer.json"
        self.engine.ask(loader, json.dumps({"path": str(file), **argument}))
        return json.loads(file.read_text())

    def look(self) -> Any:
        """Hashes and sizes in the engine; see `memory_loaders.look`."""
        return self.ask(LOOK_LOADER)

    def stage(self, stage: Callable[..., Reply], *tags: str) -> tuple[str, float]:
        """Go through a stage; its reply and its seconds."""
        started = time.perf_counter()
        status, text = stage(self.url, *tags)
        seconds = time.perf_counter() - started
        assert status == 200, text
        return text, seconds

    @contextmanager
    def asleep(self) -> Iterator[dict[str, float]]:
        """Release all, resume the weights; at the end of the block the rest. Yields the seconds."""
        seconds = {"release": self.stage(release, *ALL_TAGS)[1]}
        seconds["resume_weights"] = self.stage(resume, "weights")[1]
        yield seconds
        seconds["resume_rest"] = self.stage(resume, "cuda_graph", "kv_cache")[1]

    def freed_by(self, tag: str) -> dict[str, int]:
        """Bytes that the release of one tag gives back to the GPU, and what its reply tells."""
        before = free_bytes()
        text, _ = self.stage(release, tag)
        freed = free_bytes() - before
        self.stage(resume, tag)
        [told] = json.loads(text)["stages"][tag]["gpu_bytes"]
        return {"freed": freed, "told": told}


def free_bytes() -> int:
    """Free memory of the GPU, all processes together; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def check_cycles(name: str, folder: Path, *, device: str, num_cycles: int) -> dict[str, Any]:
    """Serve one of `CYCLE_MODELS`: two syncs awake, one cycle with poison, `num_cycles` without.

    Every cycle generates the same; nothing moves, grows or is allocated under another tag.

    Returns:
        "nan" of the engine where it was poisoned; "freed" by each tag; "seconds" of each cycle;
        "lost_gpu_bytes" in all; "policy" of the backup; "log".
    """
    make_model(name, folder / "model")
    extra, on_gpu = ["--log-level", "info", "--decode-log-interval", "1"], device != "cpu"
    if on_gpu:
        extra += ["--mm-attention-backend", "triton_attn"]
        if makes_breakable_graphs():  # of prefills, which cannot be released
            extra += ["--cuda-graph-backend-prefill", "disabled"]
        if name in MIXTURES_OF_EXPERTS:
            extra += ["--moe-runner-backend", "triton"]
    with served(
        folder,
        device=device,
        loaders=MEMORY_LOADERS,
        extra=tuple(extra),
        host_backup="auto",
        variables=GRAPHS_UNDER_THE_TAG if on_gpu else {},
    ) as engine:
        there = torch.device(device, 0) if on_gpu else torch.device(device)
        weights = checkpoint_weights(name, folder / "model", there)
        manager = engine.trainer(there).manager("compiled", bucket_bytes=1 << 20)

        def sync() -> tuple[int, int]:
            """How many buckets were replayed, and loaded eagerly."""
            asyncio.run(manager.sync(iter(weights), version="unchanged"))
            return manager.report.num_replayed, manager.report.num_eager

        seen = _check_cycles(Memory(engine), sync, num_cycles)
        assert engine.lives, "the engine died"
        return {**seen, "log": engine.log}


def _check_cycles(
    memory: Memory, sync: Callable[[], tuple[int, int]], num_cycles: int
) -> dict[str, Any]:
    loaded = memory.look()
    sync()
    replayed = sync()
    assert replayed[0] > 0 == replayed[1], "the plan was made and then replayed"
    awake = memory.look()
    assert (awake["hashes"], awake["nan"]) == (loaded["hashes"], []), "as SGLang's own load"
    generate(memory.url)  # kernels that are made with the first request
    expected = generate(memory.url)
    for _ in range(2):  # the engine's own copies of its buffers find their place in the first
        freed = {tag: memory.freed_by(tag) for tag in ALL_TAGS}
        sync()  # the release of the weights has lost them
    _check_same(memory.look(), awake)
    nan = _check_poisoned_cycle(memory, sync, awake)
    assert generate(memory.url) == expected
    seconds, free_before = [], free_bytes()
    for cycle in range(num_cycles):
        with memory.asleep() as stages:
            assert sync() == replayed
        seconds.append(stages)
        assert generate(memory.url) == expected, cycle
        if (cycle + 1) % LOOK_EVERY == 0:
            _check_same(memory.look(), awake)
    lost, last = free_before - free_bytes(), memory.look()
    _check_same(last, awake)
    memory.ask(STRAY_LOADER)  # what is allocated under the tag by mistake is seen by these checks
    stray = memory.look()
    assert stray["allocated"]["weights"][1] - last["allocated"]["weights"][1] == STRAY_BYTES
    assert "allocated" in _differences(stray, last)
    memory.stage(release, *ALL_TAGS)
    more = {"lost_gpu_bytes": lost, "policy": last["policy"]}
    return {"nan": nan, "freed": freed, "seconds": seconds, **more}


def _check_poisoned_cycle(
    memory: Memory, sync: Callable[[], tuple[int, int]], awake: dict[str, Any]
) -> list[str]:
    """A sync and a restore leave nothing of what was lost, in any byte under the tag: all that no
    restore brings back is NaN before the sync; names of what was.
    """
    before = memory.look()
    with memory.asleep():
        num_bytes, asleep = memory.ask(POISON_LOADER), memory.look()
        assert asleep["nan"] and asleep["hashes"] != before["hashes"], "the poison was not real"
        assert 0 < num_bytes == before["allocated"]["weights"][1] - before["residue_bytes"]
        assert sync()[1] == 0
        synced = memory.look()
    for state in (synced, memory.look()):
        _check_same(state, awake)
        assert state["pool"] == before["pool"]
    return list(asleep["nan"])


def _check_same(state: dict[str, Any], reference: dict[str, Any]) -> None:
    assert _differences(state, reference) == {}
    assert (state["stale"], state["host_bytes"]) == CLEAN


def _differences(state: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """What is not the same, by kind and name: short enough to be read in a failure."""
    found: dict[str, Any] = {}
    for kind in SAME:
        ours, theirs = state[kind], reference[kind]
        if ours != theirs and isinstance(ours, dict):
            names = [n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)]
            found[kind] = {name: (ours.get(name), theirs.get(name)) for name in names}
        elif ours != theirs:
            found[kind] = ours, theirs
    return found
