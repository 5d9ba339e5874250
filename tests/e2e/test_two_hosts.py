"""One replica over two hosts, launched by verl's `launch_servers` through our classes.

The hosts are namespaces where this machine allows them (see `support.hosts`), server actors and
trainer ranks are processes on them, SGLang is real. The server registers with a router, SGLang's
own if it is installed, and leaves it when its actor is killed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_assets import make_assets

from support.broadcast_steps import sends_between_hosts
from support.captured_launch import Worker
from support.engine_loaders import HASH_LOADER
from support.engine_steps import sync_away_and_back
from support.host_actor import HostActors
from support.hosts import Host, two_hosts
from support.remote import results_of
from support.router import is_installed, router_process
from support.sglang_server import environment
from support.trainer import run_trainer
from unit.composed_recipe import ROLLOUT, SECTION, compose
from verl_sglang_sync.bench.engine_server import START_TIMEOUT_S, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENGINE = (
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.load_format=auto",
    f"{ROLLOUT}.enforce_eager=True",
    f"{ROLLOUT}.gpu_memory_utilization=0.1",
    f"{ROLLOUT}.max_num_seqs=4",
    f"+{ROLLOUT}.engine_kwargs.sglang.device=cpu",
    f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=torch_native",
    f"+{ROLLOUT}.engine_kwargs.sglang.sampling_backend=pytorch",
    f"+{ROLLOUT}.engine_kwargs.sglang.disable_overlap_schedule=True",
    f"+{ROLLOUT}.engine_kwargs.sglang.sleep_on_idle=True",
    f"+{ROLLOUT}.engine_kwargs.sglang.max_total_tokens=1024",
    f"+{ROLLOUT}.engine_kwargs.sglang.enable_memory_saver=False",
    f"+{ROLLOUT}.engine_kwargs.sglang.custom_weight_loader=[{HASH_LOADER}]",
)


@dataclass(frozen=True)
class Launched:
    """The replica and what is around it."""

    replica: Any
    actors: HostActors
    hosts: tuple[Host, Host]
    folder: Path
    router: str

    @property
    def url(self) -> str:
        return f"http://{self.replica.server_address}"

    def on_first_host(self, expression: str) -> Any:
        """Evaluate an expression of `support.router` there; it must suit JSON."""
        code = f"import json; from support.router import *; print(json.dumps({expression}))"
        command = [*self.hosts[0].prefix, sys.executable, "-c", code]
        output = subprocess.run(
            command, env=environment("cpu", 2), capture_output=True, check=True, timeout=120
        )
        return json.loads(output.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry

    folder = tmp_path_factory.mktemp("hosts")
    make_assets(folder)
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        router = stack.enter_context(
            router_process(
                folder, hosts[0].address, free_port(), real=is_installed(), prefix=hosts[0].prefix
            )
        )
        recipe = compose(
            "+weight_sync=flattened",
            f"actor_rollout_ref.model.path={folder}/model",
            f"{SECTION}.router_url='{router}'",
            *ENGINE,
        )
        replica = RolloutReplicaRegistry.get("sglang")(
            replica_rank=0,
            config=recipe.actor_rollout_ref.rollout,
            model_config=recipe.actor_rollout_ref.model,
            gpus_per_node=1,
        )
        actors = HostActors(hosts, folder, {**environment("cpu", 2), "VERL_PLATFORM": "cpu"})
        stack.callback(actors.end)
        replica.server_class = actors
        replica.rollout_mode = RolloutMode.HYBRID
        replica.workers = [Worker(rank) for rank in range(2)]
        made = Launched(replica, actors, hosts, folder, router)
        made.on_first_host(f"wait_until_up({router!r})")
        deadline = threading.Timer(START_TIMEOUT_S, actors.end)  # then launching fails with a log
        deadline.start()
        try:
            asyncio.run(replica.launch_servers())
        finally:
            deadline.cancel()
        yield made


def test_two_hosts_make_one_engine_with_one_server(launched: Launched) -> None:
    one, two = launched.actors.made
    address, port = one.call("get_server_address")
    assert address == launched.hosts[0].address
    bracketed = f"[{address}]" if ":" in address else address
    assert launched.url == f"http://{bracketed}:{port}"
    with pytest.raises(RuntimeError, match="http server is not launched"):
        two.call("get_server_address")
    for rank, actor in enumerate((one, two)):
        titles = [
            " ".join(child.cmdline()) for child in psutil.Process(actor.process.pid).children()
        ]
        schedulers = [title.strip() for title in titles if "scheduler" in title]
        assert len(schedulers) == 1 and schedulers[0].endswith(f"TP{rank}"), titles
    networks = {Path(f"/proc/{actor.process.pid}/ns/net").readlink() for actor in (one, two)}
    assert len(networks) == (2 if launched.hosts[0].is_namespace else 1)


def test_the_server_has_joined_its_router(launched: Launched) -> None:
    assert launched.on_first_host(f"workers_of({launched.router!r})") == [launched.url]


def test_one_update_reaches_both_hosts(launched: Launched) -> None:
    options = {"urls": [launched.url], "tp": 2, "hosts": launched.hosts}
    outcomes = run_trainer(sync_away_and_back, launched.folder, **options)
    at_first, halved, back = results_of(outcomes)[0]
    assert back == at_first
    for before, after in zip(at_first, halved, strict=True):
        assert all(after[name] != before[name] for name in before if name.endswith("weight"))
    assert at_first[0] != at_first[1], "the ranks have shards of their own"


def test_ranks_on_both_hosts_send_their_shards_to_engine_ranks_on_both(launched: Launched) -> None:
    options = {"urls": [launched.url], "tp": 2, "hosts": launched.hosts}
    address = launched.hosts[0].address
    outcomes = run_trainer(sends_between_hosts, launched.folder, launched.url, address, **options)
    syncs = results_of(outcomes)[0]
    first, halved, *others = [sync["hashes"] for sync in syncs]
    assert others == [first, halved, first]
    assert halved != first
    report = syncs[-1]["report"]
    assert report["num_sent"] == report["num_buckets"]
    assert all(min(sent) > 0 for sent in report["pair_bytes"]), "also to the other host"


def test_a_server_whose_actor_is_killed_leaves_its_router(launched: Launched) -> None:
    launched.actors.end()
    deadline = time.monotonic() + 30
    while launched.on_first_host(f"workers_of({launched.router!r})") != []:
        assert time.monotonic() < deadline, "it is still among the router's workers"
