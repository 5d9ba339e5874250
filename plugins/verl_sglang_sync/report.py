"""Report of one sync: seconds per stage, buckets, tensors and bytes, as a log line and as JSON."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from sglang_loader.common.replies import StageCosts, remarks_in
from sglang_loader.common.session.messages import MAKING_PLAN, PROVING_SAVED_PLAN

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))  # verl's variable, one line for each sync

MAX_KEPT = 0.1
"""Part of the weights that the host may keep without a warning, for buffers that no sync
rewrites."""

COUNTED = ("buckets", "pulled", "exchanged", "sent", "replayed", "eager")
METRICS = "weight_sync"
"""Prefix of the names of all metrics."""
PROVEN = f"{METRICS}/proven"


@dataclass(kw_only=True)
class SyncReport:
    """Figures of one sync of one replica, collected by the replica's leading rank.

    docs/report.md explains the fields, and the stages of `seconds`.
    """

    mode: str
    replica: int | None
    weight_version: str | None = None
    num_tensors: int = 0
    num_buckets: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    staging_bytes: int = 0
    host_memory_bytes: int = 0
    num_replayed: int = 0
    num_eager: int = 0
    eager_reason: str | None = None
    num_pulled: int = 0
    num_exchanged: int = 0
    num_sent: int = 0
    pair_bytes: list[list[int]] = field(default_factory=list)
    stages: dict[str, StageCosts] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)
    engine_seconds: dict[str, float] = field(default_factory=dict)
    is_proven: bool | None = None

    def __post_init__(self) -> None:
        self.failed_stage: str | None = None  # the innermost stage that an error has ended

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of the body to stage `name`."""
        # A stage that is made again keeps its first start, and its seconds add up.
        self.started_at.setdefault(name, time.time())
        started = time.perf_counter()
        try:
            yield
        except BaseException:
            self.failed_stage = self.failed_stage or name
            raise
        finally:
            spent = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def count_bucket(self, num_tensors: int, payload_bytes: int) -> None:
        """Count a bucket, its tensors and its bytes."""
        self.num_buckets += 1
        self.num_tensors += num_tensors
        self.payload_bytes += payload_bytes

    def restart(self) -> None:
        """Reset all counts for a sync that is made again. Seconds go on adding up."""
        self.failed_stage = None
        for counts in fields(self):
            # The type is text, because annotations are not evaluated in this module.
            if counts.type == "int":
                setattr(self, counts.name, 0)

    def add_costs(self, name: str, costs: StageCosts | None) -> None:
        """Add an engine's costs of a stage, if the engine has sent any."""
        if costs:
            self.stages[name] = {**self.stages.get(name, {}), **costs}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a training step: seconds by stage, gigabytes and counts."""
        host_bytes = [
            sum(cost["host_bytes"]) for costs in self.stages.values() for cost in costs.values()
        ]
        metrics: dict[str, float] = {
            **{f"{stage}_s": spent for stage, spent in self.seconds.items()},
            "gigabytes": self.payload_bytes / 1e9,
            "staging_gigabytes": self.staging_bytes / 1e9,
            "host_gigabytes": max(host_bytes, default=0) / 1e9,
            **{f"num_{unit}": getattr(self, f"num_{unit}") for unit in COUNTED},
        }
        if self.is_proven is not None:
            metrics["proven"] = float(self.is_proven)
        if spent := self.seconds.get("sync"):
            metrics["gigabytes_per_s"] = self.payload_bytes / 1e9 / spent
        return {f"{METRICS}/{name}": value for name, value in metrics.items()}

    def write(self, report_file: str | None) -> None:
        """Log the report, and append it as one JSON line to `report_file`, if there is one."""
        logger.info("weight sync: %s", self)
        # SGLang's processes find the reasons for a slow sync. They cannot log a warning, because
        # verl launches them at log level "error".
        if self.num_replayed and self._kept_on_host > MAX_KEPT:
            warn_once(
                f"weight sync: the engine copies {self._kept_on_host:.0%} of its weights to the "
                "host when it sleeps, which takes time and host memory. The load plan does not "
                "rewrite these weights, such as a draft model, or SGLang itself copies all weights"
            )
        if self.eager_reason not in (None, MAKING_PLAN, PROVING_SAVED_PLAN):
            warn_once(
                "weight sync: SGLang's own load_weights loads buckets, slower than the load plan: "
                f"{self.eager_reason}"
            )
        if report_file is not None:
            try:
                path = Path(report_file).expanduser()
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(msgspec.json.encode(self) + b"\n")
            # A full disk, or no home folder on this host, must not end a training.
            except (OSError, RuntimeError) as error:
                warn_once(f"weight sync: nothing is added to report_file={report_file!r}: {error}")

    @property
    def _kept_on_host(self) -> float:
        """Part of the weights of which the host held a copy after the last release."""
        costs = self.stages.get("release", {}).get("weights", {})
        gpu_bytes = sum(costs.get("gpu_bytes", ()))
        return sum(costs.get("host_bytes", ())) / gpu_bytes if gpu_bytes else 0.0

    def __str__(self) -> str:
        spent = self.seconds.get("sync", 0.0)
        replica = "" if self.replica is None else f", replica {self.replica}"
        return (
            f"{self.mode}{replica}, version {self.weight_version}: "
            f"{self.payload_bytes / 1e9:.3g} GB in {spent:.3g} s, {self.num_buckets} buckets"
            f"{self._route}{self._proof}{self._memory}"
        )

    @property
    def _route(self) -> str:
        """Numbers of buckets by route, and by load plan or `load_weights`, as text."""
        gigabytes = self.sent_bytes / 1e9
        counts = (
            (self.num_pulled, self._pulled),
            (self.num_exchanged, f"exchanged in {gigabytes:.3g} GB"),
            (self.num_sent, f"sent by {len(self.pair_bytes)} ranks in {gigabytes:.3g} GB"),
            (self.num_replayed, "replayed"),
            (self.num_eager, "loaded by load_weights"),
        )
        return "".join(f", {num} {label}" for num, label in counts if num)

    @property
    def _pulled(self) -> str:
        if not self.host_memory_bytes:
            return "read in the trainer's memory"
        return f"read in {self.host_memory_bytes / 1e9:.3g} GB of a rank's pinned host memory"

    @property
    def _proof(self) -> str:
        if self.is_proven is None:
            return ""
        return ", proven bit for bit" if self.is_proven else ", NOT what the trainer had: see above"

    @property
    def _memory(self) -> str:
        """Seconds of sleep and wake-up around the sync."""
        sleep = self.seconds.get("release", 0.0)
        wake = sum(spent for name, spent in self.seconds.items() if name.startswith("resume_"))
        return f", sleep {sleep:.3g} s, wake-up {wake:.3g} s" if sleep or wake else ""


def log_remarks(reply: Any) -> None:
    """Log the remarks in an engine's reply to an update, each remark once."""
    for remark in remarks_in(str(reply.get("message"))):
        warn_once(remark)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged the same text before."""
    logger.warning("%s", text)
