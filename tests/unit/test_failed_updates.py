"""What an engine's rank is left with after an update that failed, and how the next one mends it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_loader import weight_updater_hooks as hooks
from sglang_loader.host_backup import WeightsBackup, arm
from sglang_loader.host_backup.allocations import reachable
from sglang_loader.plan_store import loader_of
from unit.released_memory import poison
from unit.test_plan_store import Model, check_loaded, sync

Others = list[tuple[str | None, bool]]


class Engine:
    """One TP rank with the real backup, loader and update; what the others say is given.

    Attributes:
        others: of each other rank, what failed and whether it has overwritten weights.
        gate: what the gate was set to, in order.
        is_busy: requests are running.
        num_flushes: of the prefix cache.
    """

    def __init__(self) -> None:
        self.model = Model()
        self.backup: WeightsBackup = arm(self.model, "auto", reachable)
        self.loader = loader_of(self.model)
        self.others: Others = []
        self.gate: list[str | None] = []
        self.is_busy = False
        self.num_flushes = 0
        self._updater = SimpleNamespace(
            tp_worker=SimpleNamespace(tp_rank=0, model_runner=SimpleNamespace(model=self.model)),
            flush_cache=self._flush,
            offload_tags=set(),
        )

    def session(self, value: float, *, fails: str | None = None) -> list[str]:
        """As `_serve_session`, without the socket; `fails` once loading has begun."""

        def load(update: Any) -> None:
            update.flush()
            update.begin()
            if fails is not None:
                raise RuntimeError(fails)
            sync(self.loader, value)

        return self.update(load)

    def update(self, load: Callable[[Any], None]) -> list[str]:
        request = SimpleNamespace(flush_cache=True, torch_empty_cache=False)
        update = hooks._Update(self._updater, request)
        return update.run(lambda: load(update))

    def sleep_and_wake(self) -> None:
        self.backup.save(self.model)
        poison(self.model)
        self.backup.restore()

    def _flush(self, *, empty_cache: bool) -> bool:
        self.num_flushes += not self.is_busy
        return not self.is_busy


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()

    def from_all(_: Any, item: Any) -> list[Any]:
        return [item, *(engine.others if isinstance(item, tuple) else [])]

    monkeypatch.setattr(hooks, "from_all_ranks", from_all)
    monkeypatch.setattr(hooks, "set_gate", engine.gate.append)
    assert engine.session(1.0) == []
    engine.sleep_and_wake()
    assert engine.session(2.0) == []
    return engine


def test_a_sync_after_a_failed_one_is_proven_by_the_same_plan(engine: Engine) -> None:
    engine.sleep_and_wake()
    host_bytes = engine.backup.host_bytes
    [failure] = engine.session(3.0, fails="the trainer aborted")
    assert "the trainer aborted" in failure
    assert "the weights are not complete" in str(engine.gate[-1])
    assert engine.session(4.0) == []
    check_loaded(engine.model, 4.0)
    assert engine.gate[-1] is None
    engine.sleep_and_wake()
    assert engine.backup.host_bytes == host_bytes, "only the residue is saved, as before"
    assert engine.session(5.0) == []


def test_a_session_that_running_requests_refuse_changes_nothing(engine: Engine) -> None:
    engine.is_busy, gate = True, list(engine.gate)
    [failure] = engine.session(3.0)
    assert "the prefix cache holds running requests" in failure
    check_loaded(engine.model, 2.0)
    assert engine.backup.stale is None
    assert engine.gate == gate
    engine.is_busy = False
    engine.backup.save(engine.model)
    assert engine.backup.host_bytes < sum(p.nbytes for p in engine.model.parameters())


def test_a_rank_that_has_not_begun_is_stale_where_another_has(engine: Engine) -> None:
    engine.others = [("TP rank 1: no memory", True)]

    def load(_: Any) -> None:
        raise ValueError("not an invitation")

    mine, theirs = engine.update(load)
    assert "not an invitation" in mine
    assert theirs == "TP rank 1: no memory"
    assert engine.backup.stale == "the last sync was not complete"
    assert engine.gate[-1] is not None


def test_the_prefix_cache_is_dropped_once_whatever_happens(engine: Engine) -> None:
    for fails in (None, "half way"):
        before = engine.num_flushes
        engine.session(3.0, fails=fails)
        assert engine.num_flushes == before + 1

    def load(_: Any) -> None:
        raise ValueError("not an invitation")

    before = engine.num_flushes
    engine.update(load)
    assert engine.num_flushes == before + 1, "other TP ranks may have come to it"
