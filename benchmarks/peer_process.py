"""One process of `peer_reads`: owns a block of GPU memory, and maps and reads another process's.

    python -m benchmarks.peer_process DEVICE INDEX BYTES       # "cuda" or "cpu", index of its GPU

Each line of standard input is a request, `{"do": method of PeerProcess, ...arguments}`; each is
answered by a line on standard output, `{"result": ...}` or `{"error": ...}`. On a CPU blocks are
files and the project's kernel runs in Triton's interpreter: a rehearsal of everything but CUDA.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from benchmarks import cuda_ipc
from sglang_loader.common import copy_kernel as batched_copy
from sglang_loader.common.copy_kernel import BatchedCopy

NUM_WARM_UPS = 2
FACTOR = -7046029254386353131  # odd: every word of the pattern differs


@dataclass(frozen=True, kw_only=True)
class Read:
    """How one process moves the bytes; see `PeerProcess.prepare`.

    Attributes:
        kind: "kernel" (the project's), "copy_" (torch's), "vector" (`_read_rows`), or of NCCL
            "send", "receive" and "exchange".
        run_bytes: length of a run, with a gap as long after it; 0: all of it is one run.
        tile_words: of a program of "kernel" or "vector"; 0: as in the project.
        num_warps: of such a program.
        num_programs: of "vector".
    """

    kind: str = "kernel"
    run_bytes: int = 0
    tile_words: int = 0
    num_warps: int = 8
    num_programs: int = 0


@triton.jit
def _read_rows(source, target, words, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Runs with gaps of their length: 16 bytes an access, and a grid of any size."""
    block = tl.program_id(0).to(tl.int64)
    while block * BLOCK < words:
        word = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source + word // RUN * RUN + word, mask=word < words)
        tl.store(target + word, value, mask=word < words)
        block += tl.num_programs(0)


def fill(block: torch.Tensor, seed: int) -> None:
    """Write the pattern of `seed`."""
    torch.arange(len(block), out=block)
    block.mul_(FACTOR).add_(seed)


class PeerProcess:
    """The requests of one process; it holds at most one mapping.

    Args:
        device: "cuda" or "cpu".
        index: of this process's GPU.
        nbytes: of one read; a block has twice as many.
    """

    def __init__(self, device: str, index: int, nbytes: int) -> None:
        self._cuda = device == "cuda"
        self._device = torch.device("cuda", index) if self._cuda else torch.device("cpu")
        if self._cuda:
            torch.cuda.set_device(self._device)
        self._words = nbytes // 8
        self._target = torch.empty(self._words, dtype=torch.int64, device=self._device)
        self._block: torch.Tensor | None = None
        self._expected: torch.Tensor | None = None
        self._mapping: cuda_ipc.Mapping | None = None
        self._run: Callable[[], object] = lambda: None
        self._read = Read()

    def describe(self) -> dict[str, Any]:
        """This process's GPU, and whether it sees and reaches others."""
        if not self._cuda:
            return {"device": "cpu"}
        properties = torch.cuda.get_device_properties(self._device)
        others = set(range(torch.cuda.device_count())) - {self._device.index}
        return {
            "device": properties.name,
            "uuid": str(properties.uuid),
            "num_sms": properties.multi_processor_count,
            "gpus_seen": torch.cuda.device_count(),
            "reaches": [torch.cuda.can_device_access_peer(self._device, i) for i in others],
            "triton": triton.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }

    def fill(self, seed: int) -> None:
        """Write a pattern into this process's block; makes the block first."""
        if self._block is None and self._cuda:
            self._block = torch.empty(2 * self._words, dtype=torch.int64, device=self._device)
        elif self._block is None:
            self._block = self._file(f"block-{os.getpid()}", 2 * self._words)
        fill(self._block, seed)
        self._synchronize()

    def export(self) -> dict[str, Any]:
        """Handle of this process's block, for one receiver."""
        assert self._block is not None
        if self._cuda:
            return cuda_ipc.export_block(self._block)
        return {"file": f"block-{os.getpid()}", "nbytes": self._block.nbytes}

    def map_block(self, way: str, handle: dict[str, Any], index: int) -> dict[str, Any]:
        """Map a block in one of `cuda_ipc.WAYS`, as memory of GPU `index` of this process."""
        started = time.perf_counter()
        if self._cuda:
            self._mapping = cuda_ipc.WAYS[way](handle, index)
        else:
            tensor = self._file(handle["file"], handle["nbytes"] // 8)
            self._mapping = cuda_ipc.Mapping(tensor, lambda: None)
        return {"seconds": time.perf_counter() - started, "on": str(self._mapping.tensor.device)}

    def inspect(self) -> dict[str, Any]:
        """What CUDA and `__cuda_array_interface__` make of the mapped, or the own, block."""
        memory = self._mapping.tensor if self._mapping else self._block
        found: dict[str, Any] = {}
        if not self._cuda or memory is None:
            return found
        with _noting(found, "attributes"):
            found["attributes"] = cuda_ipc.describe_pointer(memory.data_ptr())
        with _noting(found, "array_interface"):
            seen = cuda_ipc.tensor_by_interface(memory.data_ptr(), memory.nbytes)
            same = "the same address" if seen.data_ptr() == memory.data_ptr() else "a copy"
            found["array_interface"] = f"{seen.device}, {same}"
        return found

    def unmap_block(self) -> float:
        """Let go of the mapping; seconds."""
        self._run = lambda: None
        mapping, self._mapping = self._mapping, None
        self._synchronize()
        started = time.perf_counter()
        if mapping is not None:
            del mapping.tensor
            mapping.close()
        return time.perf_counter() - started

    def expect(self, seed: int) -> None:
        """The mapped block has the pattern of `seed`; later reads are compared with it."""
        if self._expected is None:
            self._expected = torch.empty(2 * self._words, dtype=torch.int64, device=self._device)
        fill(self._expected, seed)

    def prepare(self, read: dict[str, Any]) -> None:
        """Get ready to read, and warm up."""
        self._read = Read(**read)
        self._run = self._reader(self._read)
        self._target.fill_(-1)
        for _ in range(NUM_WARM_UPS):
            self._run()
        self._synchronize()

    def measure(self, runs: int, at: float) -> dict[str, Any]:
        """Read `runs` times from `at` on (`time.monotonic`), one read right after the other."""
        while time.monotonic() < at:
            pass
        started = time.monotonic()
        marks = [self._mark()]
        for _ in range(runs):
            self._run()
            marks.append(self._mark())
        self._synchronize()
        ended = time.monotonic()
        pairs = itertools.pairwise(marks)
        seconds = [a.elapsed_time(b) / 1e3 if self._cuda else b - a for a, b in pairs]
        right = None if self._read.kind == "send" else self._is_right()
        return {"seconds": seconds, "right": right, "started": started, "ended": ended}

    def allocate(self, sizes: list[int]) -> list[str]:
        """Blocks by `cudaMalloc`, kept until this process ends; their handles."""
        if not self._cuda:
            return ["" for _ in sizes]
        return [cuda_ipc.export_address(cuda_ipc.allocate(size)) for size in sizes]

    def time_maps(self, handles: list[str]) -> dict[str, list[float]]:
        """Seconds to map each block, to unmap it, and to map it again."""
        seconds: dict[str, list[float]] = {"map": [], "unmap": [], "map_again": []}
        for handle in handles if self._cuda else []:
            for name in ("map", "map_again"):
                started = time.perf_counter()
                address = cuda_ipc.open_runtime(handle)
                mapped = time.perf_counter()
                cuda_ipc.close_runtime(address)
                seconds[name].append(mapped - started)
                seconds["unmap"].append(time.perf_counter() - mapped)
        return seconds

    def join(self, rank: int, store: str) -> None:
        """Form a process group of two."""
        backend = "nccl" if self._cuda else "gloo"
        device = self._device if self._cuda else None
        url = f"file://{store}"
        dist.init_process_group(backend, url, rank=rank, world_size=2, device_id=device)

    def _reader(self, read: Read) -> Callable[[], object]:
        if read.kind in ("send", "receive", "exchange"):
            return self._message(read.kind)
        assert self._mapping is not None
        source, target = self._view(self._mapping.tensor), self._target
        if read.run_bytes:
            target = target.view(source.shape)
        if read.kind == "copy_":
            return lambda: target.copy_(source)
        if read.kind == "vector":
            run, grid = read.run_bytes // 8 or 1 << 40, (read.num_programs,)
            options = {"RUN": run, "BLOCK": read.tile_words, "num_warps": read.num_warps}
            return lambda: _read_rows[grid](source, target, self._words, **options)
        if not read.tile_words:
            return BatchedCopy.of([target], [source]).run
        # The project's kernel, in other shapes than the project's.
        with mock.patch.object(batched_copy, "TILE_WORDS", read.tile_words):
            copy = BatchedCopy.of([target], [source])
        tables, grid = (copy._tiles, copy._entries), (len(copy._tiles),)
        options = {"TILE": read.tile_words, "num_warps": read.num_warps}
        return lambda: batched_copy._copy_tiles[grid](*tables, **options)

    def _message(self, kind: str) -> Callable[[], object]:
        assert self._block is not None
        mine, peer = self._block[: self._words], 1 - dist.get_rank()
        if kind != "exchange":
            operation, tensor = (dist.send, mine) if kind == "send" else (dist.recv, self._target)
            return lambda: operation(tensor, peer)

        def exchange() -> None:
            both = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, self._target, peer)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return exchange

    def _view(self, block: torch.Tensor) -> torch.Tensor:
        """The words of a block that are read."""
        run = self._read.run_bytes // 8
        return block.view(-1, 2 * run)[:, :run] if run else block[: self._words]

    def _is_right(self) -> bool:
        assert self._expected is not None
        expected = self._view(self._expected)
        return torch.equal(self._target.view(expected.shape), expected)

    def _file(self, name: str, words: int) -> torch.Tensor:
        return torch.from_file(name, shared=True, size=words, dtype=torch.int64)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


@contextlib.contextmanager
def _noting(found: dict[str, Any], name: str) -> Any:
    try:
        yield
    except Exception as error:
        found[name] = said(error)


def said(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:400]
    return text if type(error) is RuntimeError else f"{type(error).__name__}: {text}"


def main(device: str, index: int, nbytes: int) -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    process: PeerProcess | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            process = process or PeerProcess(device, index, nbytes)
            answer = {"result": getattr(process, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": said(error)}
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # a lost context or a broken group must not keep the process


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
