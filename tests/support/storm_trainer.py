"""What a trainer rank does in a storm: syncs of one of a few versions, by any preset, good or bad.

ranks.begin(storm_trainer.sync, models, urls, {"preset": "flattened", "label": 7})
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from support.exports import KeptExport, calling_at, doubled, weights_of
from support.sender import Sender
from support.trainer import CPU, NamedTensors, TrainerRank
from verl_sglang_sync.sources.export import Reexport

TIMEOUT_S = 3.0
"""The trainer's limit of one request, and of the silence in a session, where a fault may wait for
it.
"""
PATIENT_S = 20.0
"""The same limit where no fault does: such a sync must end well, and a busy machine takes long."""

PRESETS = ("flattened", "packed", "in_place", "broadcast", "broadcast_compiled")
BAD_EXPORTS = ("raises", "doubled", "missing", "extra", "empty", "meta")
PLANTED = (
    "two tensors swapped",
    "a wrong offset",
    "blocks swapped",
    "tensors swapped before they are found",
    "a wrong base",
)
"""Those of `unit.planted_faults` that are in a trainer's own process, and need one rank alone."""
BUCKET_BYTES = 32 << 10
NUM_VERSIONS = 3


class PublishedError(Exception):
    """What failed came after the sync: its weights are published."""


def slot_of(label: int | str) -> int:
    """Which of the few weight sets a published version has."""
    return int(label) % NUM_VERSIONS


def sync(
    rank: TrainerRank, models: Sequence[Path], urls: Mapping[str, str], command: dict[str, Any]
) -> None:
    """One sync.

    Args:
        rank: this one.
        models: checkpoints of the versions.
        urls: of the engine, "direct" and by its "proxy".
        command: arguments of `_values`, `preset`, `label` (the version), `via` (which URL) and
            `limit_s`, or `planted` and `on` instead of those of `_values`, see `_planted`.
    """
    if "versions" not in rank.kept:
        rank.kept["versions"] = [weights_of(model, CPU) for model in models]
        rank.kept["export"] = KeptExport(rank.kept["versions"][0])
    preset, label, via = (command.pop(key, "direct") for key in ("preset", "label", "via"))
    limit_s = command.pop("limit_s", TIMEOUT_S)
    if "planted" in command:
        named = rank.kept["versions"][slot_of(label)]
        rank.use_client(urls[via], timeout_s=limit_s)
        _planted(rank, _values(rank, "in_place", named), str(label), limit_s, **command)
        return
    values = _values(rank, preset, rank.kept["versions"][slot_of(label)], **command)
    if preset.startswith("broadcast"):
        mode = "compiled" if preset.endswith("compiled") else "flattened"
        if (via, limit_s) not in rank.kept:
            rank.kept[via, limit_s] = Sender(rank, [(urls[via], rank.tp)], timeout_s=limit_s)
        rank.kept[via, limit_s].sync(values, mode, (0,), version=str(label))
        return
    if (preset, via, limit_s) not in rank.kept:
        rank.use_client(urls[via], timeout_s=limit_s)
        settings = {"bucket_bytes": BUCKET_BYTES, "timeout_s": limit_s}
        if preset in ("packed", "in_place"):
            settings["routes"] = ["pull", "exchange"] if preset == "in_place" else ["exchange"]
        mode = "compiled" if "routes" in settings else preset
        rank.kept[preset, via, limit_s] = rank.manager(mode, **settings)
    asyncio.run(_cycle(rank, rank.kept[preset, via, limit_s], values, str(label)))


def _planted(
    rank: TrainerRank, values: Any, label: str, limit_s: float, planted: str, on: int | None
) -> None:
    """Sync twice by a manager that has proven nothing, while a fault is planted in its way to read
    in place. `num_pulled` is kept: the buckets that the second sync had read in place.

    Args:
        rank: this one.
        values: what is exported.
        label: the version.
        limit_s: of a request.
        planted: the fault, one of `PLANTED`.
        on: the only rank that has it; None: all have.
    """
    from unit.planted_faults import FAULTS

    manager = rank.manager("compiled", bucket_bytes=BUCKET_BYTES, timeout_s=limit_s)
    with FAULTS["pull"][planted]() if on in (None, rank.rank) else nullcontext():
        for _ in range(2):
            asyncio.run(_cycle(rank, manager, values, label))
            rank.kept["num_pulled"] = manager.report.num_pulled


async def _cycle(rank: TrainerRank, manager: Any, values: Any, label: str) -> None:
    """`synced_s` is kept: the seconds until the weights were published."""
    started = time.monotonic()
    await manager.resume(("weights",))
    await manager.sync(values, version=label)
    rank.kept["synced_s"] = time.monotonic() - started
    try:
        await manager.resume(("kv_cache",))
    except Exception as error:
        raise PublishedError from error


def _values(
    rank: TrainerRank,
    preset: str,
    named: NamedTensors,
    slow_s: float = 0.0,
    bad: str | None = None,
    at: int = 0,
    once: bool = False,
    on: int | None = None,
) -> Iterable[Any]:
    """What is exported.

    Args:
        rank: this one.
        preset: of the sync.
        named: the version's tensors.
        slow_s: sleep before each.
        bad: a kind of fault in the export, one of `BAD_EXPORTS`.
        at: at which tensor.
        once: it cannot be iterated over twice.
        on: the only rank where it is bad.
    """
    if preset == "in_place":
        export = rank.kept["export"]
        export.write(named)
        named = list(export.state.items())
    if bad is not None and on in (None, rank.rank):
        index = at % len(named)
        return _spoilt(named, bad, index) if once else Reexport(lambda: _spoilt(named, bad, index))
    if preset == "in_place" and bad is None and not slow_s:
        return export.reexport()  # type: ignore[no-any-return]
    return Reexport(lambda: _slowly(named, slow_s))


def _spoilt(named: NamedTensors, kind: str, at: int) -> Iterator[Any]:
    """The export with one fault in it."""
    name, tensor = named[at]
    copies = list(_slowly(named, 0))

    def fail() -> None:
        raise RuntimeError(f"the export fails at tensor {at}, on purpose")

    if kind == "raises":
        return calling_at(copies, at, fail)
    others = {
        "doubled": doubled(copies, name),
        "meta": [(n, t.to("meta") if n == name else t) for n, t in copies],
        "missing": copies[:at] + copies[at + 1 :],
        # A copy of an embedding would be taken for a tied output layer, and be accepted.
        "extra": [*copies[: at + 1], (f"{name}_of_another", tensor + 1), *copies[at + 1 :]],
        "empty": [],
    }
    return iter(others[kind])


def _slowly(named: NamedTensors, seconds: float) -> Iterator[Any]:
    """Tensors of its own in every export, as verl's are, each after so many seconds."""
    for name, tensor in named:
        time.sleep(seconds)
        yield name, tensor.clone()
