"""The other end of a `peer_process`: starts it, sends requests, and waits no longer than it may.

peer = Peer(setting, gpus="1")
peer.ask("fill", seed=1)
together([left, right], "measure", {left: {...}, right: {...}})      # both at the same time
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peer_process import said

ROOT = Path(__file__).resolve().parents[1]


@dataclass(kw_only=True)
class Setting:
    """What all processes of a run have in common.

    Attributes:
        device: "cuda" or "cpu".
        nbytes: of one read.
        folder: in which they run.
        deadline: after which none is waited for (`time.monotonic`).
        peers: those started so far.
    """

    device: str
    nbytes: int
    folder: str
    deadline: float
    peers: list[Peer] = field(default_factory=list)


class Peer:
    """A `peer_process`, started at once; it imports torch meanwhile.

    Args:
        setting: of the run.
        gpus: that it sees, as the driver numbers them.
        index: of its own GPU among them.
    """

    def __init__(self, setting: Setting, gpus: str, index: int = 0) -> None:
        self._deadline = setting.deadline
        self.index = index
        self.gone = ""
        environment = {
            **os.environ,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": gpus if setting.device == "cuda" else "",
            "NCCL_CUMEM_ENABLE": "0",  # as SGLang sets it
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")]
            ),
            **({} if setting.device == "cuda" else {"TRITON_INTERPRET": "1"}),
        }
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.peer_process"),
                *(setting.device, str(index), str(setting.nbytes)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=setting.folder,
        )
        setting.peers.append(self)

    def send(self, do: str, **arguments: Any) -> None:
        """Send a request."""
        if self.gone:
            raise RuntimeError(f"the process is gone: {self.gone}")
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        except OSError as error:
            self.end(said(error))
            raise RuntimeError(f"the process ended: {error}") from error

    def receive(self, timeout_s: float = 90) -> Any:
        """The answer; a process that gives none in time is ended."""
        stream, left = self._process.stdout, self._deadline - time.monotonic()
        assert stream is not None
        wait = max(min(timeout_s, left), 0)
        is_there, _, _ = select.select([stream], [], [], wait)
        line = stream.readline() if is_there else ""
        if not line:
            why = "it ended" if is_there else f"no answer within {wait:.0f} s"
            self.end(why)
            raise RuntimeError(why)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a request and wait for the answer."""
        self.send(do, **arguments)
        return self.receive()

    def end(self, why: str = "no longer needed") -> None:
        """End the process."""
        if not self.gone:
            self.gone = why
            self._process.kill()
            self._process.wait()


def together(peers: Iterable[Peer], do: str, arguments: Mapping[Peer, dict[str, Any]]) -> list[Any]:
    """One request to several processes; every answer is taken, then the first error is raised."""
    answers, errors = [], []
    peers = list(peers)
    for peer in peers:
        peer.send(do, **arguments[peer])
    for peer in peers:
        try:
            answers.append(peer.receive())
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers
