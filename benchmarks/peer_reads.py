"""Reads of another GPU's memory by the project's copy kernel, between processes of one host.

    PYTHONPATH=plugins python benchmarks/peer_reads.py --json FILE     # two GPUs
    python benchmarks/peer_reads.py --device cpu                       # rehearsal without CUDA

Processes hide each other's GPU, as verl's workers and SGLang's servers do. One owns a block of
memory; another maps it (`cuda_ipc`) and reads it into its own. Measured: the ways of mapping, the
time that takes, and the rate of reads by length of run, from the same GPU, from the peer, and both
ways at once; beside it torch's copy of the mapped block and NCCL. Every read is compared with the
owner's pattern. An experiment that fails is a row with its error, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins")]

from benchmarks.peer_client import Peer, Setting, together  # noqa: E402
from benchmarks.peer_process import Read, said  # noqa: E402
from verl_sglang_sync.bench.results_file import write_results  # noqa: E402

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ONE_RUN = 0
RUN_BYTES = (
    *(64, 128, 256, 512, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB),
    ONE_RUN,
)
SWEPT_RUNS = (64, 512, 4 * KIB, ONE_RUN)
PROJECT_SHAPES = (  # (words, warps) of a program of the project's kernel; its own: 8192, 8
    *((1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 16)),
    *((8192, 8), (8192, 16), (16384, 16)),
)
VECTOR_SHAPES = tuple((words, grid) for words in (2048, 4096) for grid in (32, 66, 132, 528, 1056))
BLOCK_SIZES = (2 * MIB, 64 * MIB, GIB)
BLOCKS_EACH = 5
OWNERS_GPU, READERS_GPU = 0, 1
SEEDS = {"left": 1, "right": 2, "control": 3}
PROBES = {  # arm: (GPUs seen, index of its GPU, way to map, index under which it maps)
    "hidden, runtime": (str(READERS_GPU), 0, "runtime", 0),
    "hidden, driver": (str(READERS_GPU), 0, "driver", 0),
    "hidden, torch": (str(READERS_GPU), 0, "torch", 0),
    "hidden, torch, no event": (str(READERS_GPU), 0, "torch, no event", 0),
    "control, runtime": ("0,1", 1, "runtime", 1),
    "control, torch": ("0,1", 1, "torch", 1),
    "control, torch, for the owner's GPU": ("0,1", 1, "torch", 0),
}
Row = dict[str, Any]


@dataclass
class Bench:
    """One run: how it measures, and the rows so far."""

    setting: Setting
    runs: int
    is_hidden: bool
    rows: list[Row] = field(default_factory=list)

    def start(self, gpu: int) -> Peer:
        """A process of one GPU, to which the other is hidden unless `--visible`."""
        gpus, index = (str(gpu), 0) if self.is_hidden else ("0,1", gpu)
        return Peer(self.setting, gpus, index)

    def note(self, arm: str, model: str = "-", **what: Any) -> Row:
        """Add a row."""
        gpus = 2 if self.setting.device == "cuda" else 0
        self.rows.append({"arm": arm, "model": model, "gpus": gpus, "tp": 1, **what})
        return self.rows[-1]

    @contextlib.contextmanager
    def trying(self, arm: str, model: str = "-") -> Iterator[None]:
        """Report an error as a row and go on."""
        try:
            yield
        except Exception as error:
            self.note(arm, model, error=said(error))

    def measure(self, arm: str, reads: Mapping[Peer, Read]) -> float:
        """Have all processes read at the same time; bytes per second of the slowest.

        An error is a row and a rate of 0.
        """
        read = next(iter(reads.values()))
        model = label(read.run_bytes)
        with self.trying(arm, model):
            together(reads, "prepare", {p: {"read": asdict(r)} for p, r in reads.items()})
            at = time.monotonic() + 0.02
            given = {peer: {"runs": self.runs, "at": at} for peer in reads}
            answers = together(reads, "measure", given)
            readers = [answer for answer in answers if answer["right"] is not None]
            medians = [statistics.median(answer["seconds"]) for answer in readers]
            shared = min(a["ended"] for a in answers) - max(a["started"] for a in answers)
            self.note(
                arm,
                model,
                bytes=self.setting.nbytes,
                runs=self.runs,
                median_s={"read": max(medians)},
                runs_s=[answer["seconds"] for answer in readers],
                bytes_per_s=[self.setting.nbytes / seconds for seconds in medians],
                right=all(answer["right"] for answer in readers),
                overlap=shared / max(a["ended"] - a["started"] for a in answers),
                read=asdict(read),
            )
            return self.setting.nbytes / max(medians) if self.rows[-1]["right"] else 0.0
        return 0.0


def label(run_bytes: int) -> str:
    """A length of run, such as "4 KiB"."""
    for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if run_bytes >= size:
            return f"{run_bytes // size} {unit}"
    return f"{run_bytes} B" if run_bytes else "one run"


def probe(
    bench: Bench, arm: str, reader: Peer, owner: Peer, seed: int, way: str, index: int
) -> Row:
    """Map in one way; read by copy and kernel, and again after the owner has written."""
    steps: dict[str, Any] = {}
    row = bench.note(f"map: {arm}", steps=steps, right=False)

    def step(name: str, do: str, **arguments: Any) -> bool:
        try:
            steps[name] = reader.ask(do, **arguments)
        except Exception as error:
            steps[name] = said(error)
            return False
        return True

    try:
        steps["export"] = owner.ask("export")
        if step("map", "map_block", way=way, handle=steps["export"], index=index):
            step("inspect", "inspect")
            results = []
            for turn in ("read", "reread"):
                owner.ask("fill", seed=seed + 10 * (turn == "reread"))
                reader.ask("expect", seed=seed + 10 * (turn == "reread"))
                for kind, run in (("copy_", ONE_RUN), ("kernel", ONE_RUN), ("kernel", 512)):
                    name = f"{turn}, {kind}, {label(run)}"
                    if step(name, "prepare", read=asdict(Read(kind=kind, run_bytes=run))):
                        step(name, "measure", runs=1, at=0)
                    if isinstance(steps[name], dict):
                        steps[name] = "right" if steps[name]["right"] else "WRONG BYTES"
                    results.append(steps[name])
            row["right"] = set(results) == {"right"}
            step("unmap", "unmap_block")
    except RuntimeError as error:
        row["error"] = said(error)
    finally:
        with contextlib.suppress(RuntimeError):
            owner.ask("fill", seed=seed)
    return row


def connect(bench: Bench, arm: str, reader: Peer, owner: Peer, seed: int, way: str) -> bool:
    """Map the owner's block for what is measured next."""
    with bench.trying(f"map: {arm}"):
        reader.ask("map_block", way=way, handle=owner.ask("export"), index=reader.index)
        reader.ask("expect", seed=seed)
        return True
    return False


def map_times(bench: Bench, owner: Peer, mapper: Peer) -> None:
    """Seconds to map blocks; the first one of all is the mapper's first of the other GPU."""
    for size in BLOCK_SIZES:
        with bench.trying("map time", label(size)):
            handles = owner.ask("allocate", sizes=[size] * BLOCKS_EACH)
            seconds = mapper.ask("time_maps", handles=handles)
            medians = {name: statistics.median(v) for name, v in seconds.items() if v}
            bench.note("map time", label(size), bytes=size, median_s=medians, runs_s=seconds)


def sweep(bench: Bench, reader: Peer) -> dict[int, Read]:
    """Other shapes of the project's kernel, and wider accesses; the best by length of run."""
    small = bench.setting.device == "cpu"
    best: dict[int, tuple[float, Read]] = {}
    shapes = [
        (f"peer, tile {words}, {warps} warps", Read(tile_words=words, num_warps=warps))
        for words, warps in PROJECT_SHAPES[-2 if small else 0 :]
    ] + [
        (
            f"peer, 16 B, tile {words}, grid {grid}",
            Read(kind="vector", tile_words=words, num_programs=grid),
        )
        for words, grid in VECTOR_SHAPES[-2 if small else 0 :]
    ]
    for arm, shape in shapes:
        for run in SWEPT_RUNS:
            read = replace(shape, run_bytes=run)
            rate = bench.measure(arm, {reader: read})
            best[run] = max(best.get(run, (0.0, read)), (rate, read), key=lambda pair: pair[0])
    for run, (rate, read) in best.items():
        bench.note("best shape", label(run), bytes_per_s=[rate], read=asdict(read))
    return {run: read for run, (_, read) in best.items()}


def messages(bench: Bench, left: Peer, right: Peer) -> None:
    """The same bytes by NCCL."""
    with bench.trying("NCCL"):
        store = str(Path(bench.setting.folder) / "store")
        ranks = {left: {"rank": 0, "store": store}, right: {"rank": 1, "store": store}}
        together(ranks, "join", ranks)
        left.ask("expect", seed=SEEDS["right"])
        right.ask("expect", seed=SEEDS["left"])
        bench.measure("NCCL, one way", {left: Read(kind="send"), right: Read(kind="receive")})
        bench.measure("NCCL, both ways", dict.fromkeys((left, right), Read(kind="exchange")))


def experiments(bench: Bench) -> None:
    """All of them, the riskier last."""
    left, right = bench.start(OWNERS_GPU), bench.start(READERS_GPU)
    owner = Peer(bench.setting, "0,1", OWNERS_GPU)
    probes = {arm: Peer(bench.setting, gpus, index) for arm, (gpus, index, _, _) in PROBES.items()}
    mapper, local = bench.start(READERS_GPU), bench.start(OWNERS_GPU)
    for name, peer in {"left": left, "right": right, "control": owner}.items():
        with bench.trying(f"process: {name}"):
            peer.ask("fill", seed=SEEDS[name])
            bench.note(f"process: {name}", found=peer.ask("describe") | peer.ask("inspect"))

    usable = []
    for arm, reader in probes.items():
        _, _, way, index = PROBES[arm]
        hidden = arm.startswith("hidden")
        seen, seed = (left, SEEDS["left"]) if hidden else (owner, SEEDS["control"])
        if probe(bench, arm, reader, seen, seed, way, index)["right"] and hidden:
            usable.append(way)
        if arm == "control, runtime" and connect(bench, "control", reader, owner, seed, way):
            for run in SWEPT_RUNS:
                bench.measure("control, kernel", {reader: Read(run_bytes=run)})
        reader.end()
    owner.end()
    if not usable:
        untried = "cuMemExportToShareableHandle, for memory of cuMemCreate (expandable segments)"
        bench.note("map: hidden", error=f"no way works; not tried: {untried}")
    way = (usable or ["runtime"])[0]
    bench.note("way", found=way, usable=usable)

    map_times(bench, left, mapper)
    mapper.end()
    best: dict[int, Read] = {}
    for arm, reader in {"local": local, "peer": right}.items():
        if connect(bench, arm, reader, left, SEEDS["left"], way):
            for run in RUN_BYTES:
                bench.measure(f"{arm}, kernel", {reader: Read(run_bytes=run)})
            bench.measure(f"{arm}, copy_", {reader: Read(kind="copy_")})
            best = sweep(bench, right) if reader is right else {}
    local.end()
    if connect(bench, "both ways", left, right, SEEDS["right"], way):
        for run in RUN_BYTES:
            bench.measure("both ways, kernel", dict.fromkeys((left, right), Read(run_bytes=run)))
        for read in best.values():
            bench.measure("both ways, best shape", dict.fromkeys((left, right), read))
        bench.measure("both ways, copy_", dict.fromkeys((left, right), Read(kind="copy_")))
    messages(bench, left, right)


def print_rows(rows: list[Row]) -> None:
    """What was found, the errors, then GB/s in each direction by length of run."""
    rates: dict[str, dict[str, str]] = {}
    for row in rows:
        if "runs_s" in row and "bytes_per_s" in row:
            marks = ("" if row["right"] else "!") + ("" if row["overlap"] > 0.8 else "~")
            cell = f"{min(row['bytes_per_s']) / 1e9:.1f}{marks}"
            rates.setdefault(row["arm"], {})[row["model"]] = cell
            continue
        print(f"{row['arm']}; {row['model']}: {row.get('error', '')}")
        for key in ("found", "median_s", "read", "bytes_per_s"):
            if key in row:
                print(f"    {key}: {row[key]}")
        for name, answer in row.get("steps", {}).items():
            if name != "export":
                print(f"    {name}: {answer}")
        if firsts := row.get("runs_s", {}).get("map"):  # of "map time"
            print(f"    first: {firsts[0]}")
    columns = [label(run) for run in RUN_BYTES]
    print("\nGB/s read, the slower direction; ! wrong bytes, ~ less than 80 % at the same time")
    print(" " * 34 + "".join(f"{name:>9}" for name in columns))
    for arm, cells in rates.items():
        print(f"{arm:34}" + "".join(f"{cells.get(name, '-'):>9}" for name in columns))


def ask_driver(*options: str) -> str:
    """What nvidia-smi says."""
    command = ["nvidia-smi", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout


def main() -> None:
    """Run all experiments; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mib", type=int, help="of one read (2048; cpu: 1)")
    parser.add_argument("--runs", type=int, help="of each read (7; cpu: 1)")
    parser.add_argument("--limit-s", type=float, default=220, help="of the whole run")
    parser.add_argument("--visible", action="store_true", help="hide no GPU in the measurements")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    started = time.monotonic()
    mib, runs = (2048, 7) if args.device == "cuda" else (1, 1)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            device=args.device,
            nbytes=(args.mib or mib) * MIB,
            folder=folder,
            deadline=started + args.limit_s,
        )
        bench = Bench(setting, args.runs or runs, not args.visible)
        try:
            with bench.trying("topology"):
                if args.device == "cuda":
                    driver = ask_driver("--query-gpu=driver_version", "--format=csv,noheader")
                    bench.note("topology", found=ask_driver("topo", "-m"), driver=driver)
            with bench.trying("experiments"):
                experiments(bench)
        finally:
            for peer in setting.peers:
                peer.end()
            bench.note("run", found=f"{time.monotonic() - started:.0f} s")
            if args.json:
                write_results(args.json, "peer_reads", bench.rows)
            print_rows(bench.rows)


if __name__ == "__main__":
    main()
