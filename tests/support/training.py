"""Training runs of verl on the CPU: what a run is, and two at a time.

Most of a run are imports, in one process after another, which leave a core idle. Each of two runs
has a network of its own, in which no other one can take a port; where this machine allows none,
there is one run after another.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickstart import run_recipe
from rich.console import Console
from tiny_assets import make_assets

from support.forks import TESTS

FINDING_TESTS = (f"PYTHONPATH={TESTS}",)
"""Variables of a run whose processes import a module of the tests."""

LIMIT_S = 800.0
"""Of a run that hangs: less than pytest's for a test, which waits for it."""
CLONE_NEWNET = 0x40000000  # unshare(2): the thread's, and of what it starts


@dataclass(frozen=True)
class Run:
    """A run of `recipes/grpo_cpu_tiny.sh`, of two steps and at verl's default log level.

    Attributes:
        preset: "": verl's own sync.
        workers: trainer ranks; `workers / tp` replicas.
        tp: of an engine.
        architecture: of the model, as `make_assets` has it; likewise `tied`.
        overrides: of the recipe's settings; "{folder}" is the run's folder.
        variables: "NAME=value" each, of all processes; likewise.
    """

    preset: str
    workers: int = 1
    tp: int = 1
    architecture: str = "qwen3"
    tied: bool = False
    overrides: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    def prepare(self, folder: Path) -> None:
        """Make the model and the data in the new `folder`."""
        make_assets(folder, architecture=self.architecture, tied=self.tied)

    def train(self, folder: Path, preloaded: Mapping[str, str]) -> None:
        """Train it; all files are in `folder`. An error if it fails.

        Args:
            preloaded: variables with which its processes are forked.
        """
        sizes = (f"WORKERS={self.workers}", f"ROLLOUT_TP={self.tp}")
        variables = (v.format(folder=folder) for v in (*sizes, *self.variables))
        status = run_recipe(
            folder,
            self.preset,
            *(override.format(folder=folder) for override in self.overrides),
            console=Console(quiet=True),
            limit_s=LIMIT_S,
            environment={**preloaded, **dict(variable.split("=", 1) for variable in variables)},
        )
        assert status == 0, (folder / "run.log").read_text()[-6000:]


@contextmanager
def started(
    runs: Sequence[Any], folder: Path, preloaded: Mapping[str, str]
) -> Iterator[dict[Any, Future[Path]]]:
    """Start the runs, or others with the same methods, in this order, two at a time; each promises
    its folder, in `folder`. Equal ones are one.

    Those that have not begun when the block ends do not.

    Args:
        preloaded: variables with which their processes are forked.
    """

    def trained(run: Any, own: Path) -> Path:
        run.train(own, preloaded)
        return own

    folders = {run: folder / str(number) for number, run in enumerate(runs)}
    for run, own in folders.items():  # torch's seed and default dtype are those of all threads
        run.prepare(own)
    with ThreadPoolExecutor(1) as pool:
        may_have_networks = pool.submit(_enter_own_network).result()
    lanes = (2, _enter_own_network) if may_have_networks else (1, None)
    pool = ThreadPoolExecutor(lanes[0], initializer=lanes[1])
    try:
        yield {run: pool.submit(trained, run, own) for run, own in folders.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def _enter_own_network() -> bool:
    """Have this thread, and all that it starts, see an own loopback device alone; False where this
    is not allowed, and nothing has changed.
    """
    if shutil.which("ip") is None or ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True
