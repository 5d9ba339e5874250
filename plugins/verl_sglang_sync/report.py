"""What one sync cost: seconds per stage, buckets, tensors and bytes, as a log line and as JSON."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sglang_loader.common.check_remarks import REMARK, remarks_in
from sglang_loader.common.stage_costs import StageCosts

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SyncReport:
    """Accounting of one sync of one replica, as its leading rank saw it.

    Attributes:
        mode: the preset's mode.
        replica: rank of the replica; None where one sync serves all (disaggregated).
        weight_version: the version that went live (verl's global step), None before the commit.
        num_tensors: tensors sent.
        num_buckets: buckets sent.
        payload_bytes: bytes of the tensors.
        sent_bytes: bytes that the engine rank was given of them: fewer where buckets came arranged.
        staging_bytes: most bytes of staging buffers held.
        num_replayed: buckets that the engine loaded by a compiled plan.
        num_eager: buckets that it loaded by its own loader in mode "compiled".
        eager_reason: why those were not replayed.
        num_pulled: buckets that the engine read where the trainer's parameters are, without an
            export.
        num_arranged: buckets that held only what this engine rank reads, as its plan has it.
        num_exchanged: buckets that were filled from the ranks' shards, without the full export.
        stages: what the engine did in "release", "resume_weights" and "resume_kv_cache", by tag:
            for each TP rank the seconds, the bytes unmapped from or mapped into its GPU, and the
            bytes that the host then holds (`sglang_loader.common.stage_costs`).
        seconds: host seconds by stage: "release" (the sleep before this sync), "resume_weights",
            "open" (until the engine has joined the session), "export" (waiting for the trainer's
            generator),
            "confirm" (where it is left out: are the parameters where they were?), "gather" (the
            exchange of shards), "learn" (how the next sync can do without), "pack", "send"
            (waiting for a broadcast), "load" (waiting for the engine), "commit", "publish"
            (until all TP ranks have agreed), "reply" (where the request's had to be waited for),
            "resume_kv_cache"; "sync": all of a disaggregated sync.
        started_at: Unix seconds at which a stage began, the first time where it has several parts;
            without "release" where the server's process went through it.
        engine_seconds: mode "compiled": how this rank's engine spent the same time: "waiting" for
            the trainer, "launching", "copying" (`Loaded.seconds`).
    """

    mode: str
    replica: int | None
    weight_version: str | None = None
    num_tensors: int = 0
    num_buckets: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    staging_bytes: int = 0
    num_replayed: int = 0
    num_eager: int = 0
    eager_reason: str | None = None
    num_pulled: int = 0
    num_arranged: int = 0
    num_exchanged: int = 0
    stages: dict[str, StageCosts] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)
    engine_seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the body to stage `name`."""
        self.started_at.setdefault(name, time.time())
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def count_bucket(self, num_tensors: int, payload_bytes: int) -> None:
        """Count one bucket and what is in it."""
        self.num_buckets += 1
        self.num_tensors += num_tensors
        self.payload_bytes += payload_bytes

    def restart(self) -> None:
        """Count anew: the sync is made again. What was spent stays."""
        for counts in fields(self):
            if counts.type == "int":
                setattr(self, counts.name, 0)

    def add_costs(self, name: str, costs: StageCosts | None) -> None:
        """Take over what a stage cost in the engine; None or nothing where it told nothing."""
        if costs:
            self.stages[name] = {**self.stages.get(name, {}), **costs}

    def publish(self, report_file: str | None) -> None:
        """Log the report, and append it as one JSON line where a file is configured.

        Why buckets were not replayed is a warning, once for each reason: SGLang's processes, which
        find it out, are launched by verl at log level "error".
        """
        logger.info("weight sync: %s", self)
        if self.eager_reason is not None:
            warn_once(
                "weight sync: SGLang's own load_weights loads buckets, slower than the load plan: "
                f"{self.eager_reason}"
            )
        if report_file is not None:
            path = Path(report_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(asdict(self)) + "\n")

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {spent:.3f} s" for name, spent in self.seconds.items())
        return (
            f"{self.mode}, replica {self.replica}, version {self.weight_version}: "
            f"{self.num_tensors} tensors, {self.payload_bytes / 1e6:.1f} MB in {self.num_buckets} "
            f"buckets{self._route}; {stages}{_bytes_of(self.stages)}"
        )

    @property
    def _route(self) -> str:
        """How the buckets came, where that is not the full export, whole."""
        counts = (
            (self.num_pulled, "read in the trainer's memory"),
            (self.num_exchanged, "exchanged"),
            (
                self.num_arranged,
                f"trimmed to {self.sent_bytes / 1e6:.1f} MB that the engine reads",
            ),
        )
        return "".join(f", {num} {how}" for num, how in counts if num)


def log_remarks(reply: Any) -> None:
    """Log what an engine's reply to an update says of its manifest check; each remark once."""
    for remark in remarks_in(str(reply.get("message"))):
        warn_once(f"{REMARK}{remark}")


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged the same before."""
    logger.warning("%s", text)


def _bytes_of(stages: Mapping[str, StageCosts]) -> str:
    """The bytes of the stages, all ranks together."""
    texts = []
    for name, costs in stages.items():
        for tag, cost in costs.items():
            gpu, host = (sum(cost[kind]) / 1e6 for kind in ("gpu_bytes", "host_bytes"))
            texts.append(f"{name} {tag} {gpu:.1f} MB" + (f" (host {host:.1f} MB)" if host else ""))
    return "; " + ", ".join(texts) if texts else ""
