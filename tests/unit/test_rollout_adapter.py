"""An adapter's sync by verl's rollout class, which can bring the weights below it again."""

import asyncio
from types import SimpleNamespace

from verl_sglang_sync.sources.export import Reexport
from verl_sglang_sync.verl.rollout import WeightSyncRollout


class Manager:
    """Keeps the functions that it is given for the weights below an adapter."""

    def __init__(self):
        self.bases = []

    async def sync_adapter(self, collect, *, version, base):
        self.bases.append(base)

    def take_written(self):
        return None


class Rollout(WeightSyncRollout):
    """One that has a manager and no engine."""

    _format = SimpleNamespace(applied=lambda weights: [("quantised", *weights)])

    def __init__(self, manager):
        self._settings, self._engine, self._manager = SimpleNamespace(), None, manager
        self.device_mesh = {"infer_tp": SimpleNamespace(size=lambda: 1)}

    async def _sharding_manager(self):
        return self._manager


def test_the_base_of_an_adapter_is_formatted():
    manager = Manager()
    rollout = Rollout(manager)
    for weights in (Reexport(list, base=lambda: ["a", "b"]), []):
        asyncio.run(rollout.update_weights(weights, 3, peft_config={"r": 1}, base_sync_done=True))
    with_base, without = manager.bases
    assert with_base() == [("quantised", "a", "b")]
    assert without is None
