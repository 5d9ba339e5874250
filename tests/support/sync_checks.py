"""Syncs of other weights every time, in every way, and what must hold of them on any device."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from support.exports import NORM, KeptExport, OffloadedExport, ShardedExport, doubled
from support.served import Served
from support.trainer import Ranks, TrainerRank, report_of_cycle, sync_error

MODES = ("flattened", "compiled")
LOST = "model.layers.0.self_attn.k_proj.weight"
STRANGE = "model.layers.0.self_attn.of_another_model.weight"
SCALES = (0.5, 0.25, 2.0, 1.0)

Way = list[list[dict[str, Any]]]
"""Of each sync of `SCALES`, every rank's report."""

STAGED: dict[str, Any] = {"routes": ["exchange"]}
PROVEN = {"prove_every_n_syncs": 2}


def check_mode(engine: Served, ranks: Ranks, mode: str) -> None:
    """A sync of other weights changes every tensor; one of the checkpoint's brings them back, also
    after syncs of what does not fit, which name it on every rank and are not published.
    """
    reference = engine.hashes()
    ranks.run(_cycle_by, mode, 0.5, {})
    for before, after in zip(reference, engine.hashes(), strict=True):
        assert before.keys() == after.keys()
        assert not [name for name in before if before[name] == after[name]]
    errors, *others = ranks.run(_misfits, mode)
    assert others == [errors] * (engine.tp - 1)
    assert errors.pop("good") == [None] * 5
    refused = errors.pop("refused")
    assert refused.startswith("weight sync failed")
    assert f"load_weights failed at {NORM} [" in refused
    assert "TP rank 0: Traceback" in refused
    for what, error in errors.items():
        assert "nothing is published: the weights do not fit the engine's model" in error
        assert f"1 missing: {LOST}" in error
        assert (f"1 unexpected: {STRANGE}" in error) == (what != "less")
    for settings in ({"bucket_bytes": 1 << 20}, {"multi_stage": False}):
        ranks.run(_cycle_by, mode, 1.0, settings)
        assert engine.hashes() == reference


def _cycle_by(rank: TrainerRank, mode: str, scale: float, settings: dict[str, Any]) -> None:
    report_of_cycle(rank.manager(mode, **settings), rank.weights(scale), f"{mode} {scale}")


def _misfits(rank: TrainerRank, mode: str) -> dict[str, Any]:
    """What the loader refuses, what it drops without a word, also where it comes again or in an
    export that cannot be repeated, and good syncs between.
    """
    good, manager = rank.weights(), rank.manager(mode)
    less = [(name, tensor) for name, tensor in good if name != LOST]
    dropped = [*less, (STRANGE, torch.ones(4, 4, device=rank.device))]
    errors: dict[str, Any] = {"good": [sync_error(manager, good)]}
    for name, weights in (
        ("refused", doubled(good)),
        ("dropped", dropped),
        ("dropped again", dropped),
        ("one shot", iter(dropped)),
        ("less", less),
    ):
        by = rank.manager(mode) if name == "one shot" else manager
        errors[name] = sync_error(by, weights)
        if name in ("one shot", "less"):
            errors["good"] += [sync_error(manager, good), sync_error(manager, iter(good))]
    return errors


class Syncs:
    """Syncs in a row by every setting: each leaves, every time, the bytes that the eager loader
    does, and the last of each is replayed.

    Args:
        engines: the replicas.
        ranks: their trainer.
    """

    def __init__(self, engines: Sequence[Served], ranks: Ranks) -> None:
        self._engines, self._ranks = engines, ranks
        self.eager: list[Any] = []
        """What the engines had after each sync of the eager loader."""
        self._run("flattened")
        assert len({str(hashes) for hashes in self.eager}) == len(SCALES)
        self.pulled = self("mapped")
        self.sharded: list[Way] = []
        if len(ranks.processes) > 1:
            self.sharded = [self("sharded", **STAGED)]

    def __call__(self, export: str | None = None, **how: Any) -> Way:
        """Of an export that is kept, or of plain lists; arguments as for `_run`."""
        way = self._run("compiled", export, **how)
        for last in way[-1]:
            assert last["num_replayed"] == last["num_buckets"], last["eager_reason"]
        return way

    def _run(
        self,
        mode: str,
        export: str | None = None,
        moves_after: int = -1,
        fails_before: int = -1,
        **settings: Any,
    ) -> Way:
        way: Way = []
        self._ranks.run(_begin, mode, export, settings)
        for i, scale in enumerate(SCALES):
            way.append(self._ranks.run(_sync, scale, i == moves_after, i == fails_before))
            hashes = [engine.hashes() for engine in self._engines]
            if mode == "flattened":
                self.eager.append(hashes)
            assert hashes == self.eager[i], (export, settings)
        return way


def _begin(rank: TrainerRank, mode: str, export: str | None, settings: dict[str, Any]) -> None:
    rank.kept["manager"], rank.kept["export"] = rank.manager(mode, **settings), None
    if export == "kept":
        rank.kept["export"] = KeptExport(rank.weights())
    elif export == "offloaded":
        rank.kept["export"] = OffloadedExport(rank.weights())
    elif export is not None:
        rank.kept["export"] = ShardedExport(rank.weights(), is_mappable=export == "mapped")


def _sync(rank: TrainerRank, scale: float, moves: bool, fails: bool) -> dict[str, Any]:
    manager, export = rank.kept["manager"], rank.kept["export"]
    weights: Any = rank.weights(scale)
    if export is not None:
        if moves and rank.rank == rank.tp - 1:
            export.move(NORM)
        export.write(weights)
        weights = export.reexport()
    if fails:
        _fail_on_the_last_rank(rank, manager, weights)
    return report_of_cycle(manager, weights, str(scale))


def _fail_on_the_last_rank(rank: TrainerRank, manager: Any, weights: Any) -> None:
    """A sync whose last bucket does not leave one rank."""
    from verl_sglang_sync.engine.session import TrainerSession

    finish = mock.MagicMock(side_effect=MemoryError("nothing is left"))
    if rank.rank != rank.tp - 1:
        finish = TrainerSession.finish
    with mock.patch.object(TrainerSession, "finish", finish):
        assert "nothing is left" in (sync_error(manager, weights) or "")


def of_ranks(way: Way) -> list[list[dict[str, Any]]]:
    """By rank, its reports of the syncs."""
    return [list(reports) for reports in zip(*way, strict=True)]


def check_pulled(way: Way, pulled: list[bool], *, is_offloaded: bool = False) -> None:
    """Of which syncs the engines have read the trainer's memory, of the host if it is offloaded."""
    for reports in of_ranks(way):
        first, last = reports[0], reports[-1]
        assert [report["num_pulled"] > 0 for report in reports] == pulled
        for report in reports:
            assert report["num_pulled"] in (0, report["num_buckets"])
            assert report["num_tensors"] == first["num_tensors"]
            assert report["payload_bytes"] == first["payload_bytes"]
            told = report["engine_seconds"]
            assert told.keys() == {"waiting", "launching", "copying"}
            assert min(told.values()) >= 0 < told["launching"] < 10
        assert last["staging_bytes"] == 0
        assert (last["host_memory_bytes"] > 0) == is_offloaded, "what is pinned"
        assert "export" not in last["seconds"], "nobody gathered"


def check_exchanged(way: Way, exchanged: list[bool]) -> None:
    """In which syncs the ranks have exchanged their shards instead of gathering them."""
    for reports in of_ranks(way):
        assert [report["num_exchanged"] > 0 for report in reports] == exchanged
        for report in (report for report in reports if report["num_exchanged"]):
            assert report["num_exchanged"] == report["num_buckets"]
            assert "export" not in report["seconds"], "nobody gathered"
            assert report["seconds"]["gather"] > 0
