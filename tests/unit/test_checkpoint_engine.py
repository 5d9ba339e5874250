"""Which replicas get the weights below a LoRA adapter, and that all get the adapter."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from support.settings import settings_of
from unit.test_adapter_sync import UPDATE, Engine
from unit.trainer_ranks import trainer_ranks
from verl_sglang_sync.sources.export import Reexport
from verl_sglang_sync.sync.adapter_sync import AdapterSync
from verl_sglang_sync.trainer_ranks import TrainerRanks, WeightSyncError


class Trainer:
    """A checkpoint engine in a trainer's rank; its weight sync notes who is synced.

    Attributes:
        engines: of all replicas there are, by name.
        synced: names of the replicas of each sync of all weights.
    """

    def __init__(self, monkeypatch, *, ranks=None, is_first=True):
        from verl_sglang_sync.verl import adapter, checkpoint_engine

        ranks = ranks or TrainerRanks()
        self.engines = {name: Engine() for name in "abc"}
        self.synced = []
        self.versions = {}
        self.fails = False
        engine = checkpoint_engine.SGLangSyncCheckpointEngine(1, is_master=is_first)
        vars(engine).update(
            _weight_sync=SimpleNamespace(sync=self._sync), _ranks=ranks, _adapter=AdapterSync(ranks)
        )
        self._checkpoint_engine = engine
        monkeypatch.setattr(checkpoint_engine.ray, "get_actor", self._actor)
        monkeypatch.setattr(checkpoint_engine, "current_device", lambda: torch.device("cpu"))
        clients = {f"http://{name}:1": engine for name, engine in self.engines.items()}
        monkeypatch.setattr(checkpoint_engine, "SGLangServerClient", lambda url, **_: clients[url])
        monkeypatch.setattr(adapter, "collect_adapter", lambda *_, **__: UPDATE)

    async def _sync(self, weights, replicas, **_):
        self.synced.append("".join(replica.identity for replica in replicas))
        if self.fails:
            raise WeightSyncError("half-written")

    def _actor(self, name):
        async def address():
            if name == "silent":
                await asyncio.sleep(60)
            if name not in self.engines:
                raise RuntimeError(f"{name} has died")
            return name, 1

        async def set_global_steps(step):
            self.versions[name] = step

        return SimpleNamespace(
            _actor_id=SimpleNamespace(hex=lambda: name),
            get_server_address=SimpleNamespace(remote=address),
            set_global_steps=SimpleNamespace(remote=set_global_steps),
        )

    def send(self, names, step, **keys):
        format_ = SimpleNamespace(applied=lambda weights: weights)
        server = {"settings": settings_of("compiled", **keys), "format": format_, "num_ranks": 1}
        servers = [SimpleNamespace(actor_name=name, access={}, **server) for name in names]
        weights = Reexport(list, adapter=lambda: ([], {}))
        self._checkpoint_engine.init_process_group(servers)
        asyncio.run(self._checkpoint_engine.send_weights(weights, step))


def test_new_replicas_get_base_weights_and_adapter(monkeypatch):
    trainer = Trainer(monkeypatch)
    for step, names in enumerate(("ab", "ac", "ab", "ab", "a", "abc")):
        before = {name: engine.num_loads for name, engine in trainer.engines.items()}
        trainer.send(names, step)
        loaded = [name for name, e in trainer.engines.items() if e.num_loads > before[name]]
        assert "".join(loaded) == names
        assert {name: trainer.versions[name] for name in names} == dict.fromkeys(names, step)
    assert trainer.synced == ["ab", "ac", "ab", "abc"], "who left may have been restarted"


def test_after_a_failed_sync_all_replicas_get_weights(monkeypatch):
    trainer = Trainer(monkeypatch)
    trainer.send("ab", 1)
    trainer.fails = True
    with pytest.raises(WeightSyncError, match="half-written"):
        trainer.send("abc", 2)
    trainer.fails = False
    trainer.send("ab", 3)
    assert trainer.synced == ["ab", "abc", "ab"]


def send_to_a_server_that_is_gone():
    """On each rank of a trainer, of which only the first one asks the servers: what it raises."""
    ranks, _ = trainer_ranks(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        trainer = Trainer(monkeypatch, ranks=ranks, is_first=dist.get_rank() == 0)
        with pytest.raises(WeightSyncError) as error:
            trainer.send("ad", 1)
    return str(error.value), trainer.synced


def test_a_missing_server_is_named_on_all_ranks(pool):
    for error, synced in pool.run(send_to_a_server_that_is_gone):
        assert "rank 0: Traceback" in error and "d has died" in error
        assert synced == []


def test_a_silent_server_is_named_in_time(monkeypatch):
    trainer = Trainer(monkeypatch)
    with pytest.raises(WeightSyncError, match="server silent did not answer within"):
        trainer.send(["a", "silent"], 1, request_timeout_s=0.2)
