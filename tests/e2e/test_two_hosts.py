"""One replica over two hosts, launched by verl's `launch_servers` through our classes.

The hosts are namespaces where this machine allows them (see `support.hosts`), server actors and
trainer ranks are processes on them, SGLang is real. The server registers with a router, and leaves
it when its actor is killed.
"""

import asyncio
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_assets import make_assets

from support.captured_launch import ActorClass, Handle, hybrid_replica
from support.engine_loaders import HASH_LOADER
from support.exports import ShardedExport
from support.hosts import Host, two_hosts
from support.ipc import serialize_handles
from support.remote import Remote, finish, results_of
from support.router import RouterProcess
from support.sender import Sender
from support.served import environment
from support.settings import ENGINE_ON_A_CPU
from support.trainer import Ranks, read_hashes, sync_error
from unit.composed_recipe import ROLLOUT, SECTION, compose
from verl_sglang_sync.commands.bench.engine_server import START_TIMEOUT_S
from verl_sglang_sync.engine.server_client import operations

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENGINE = (
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.load_format=auto",
    f"{ROLLOUT}.gpu_memory_utilization=0.1",
    f"{ROLLOUT}.max_num_seqs=4",
    *ENGINE_ON_A_CPU,
    f"+{ROLLOUT}.engine_kwargs.sglang.custom_weight_loader=[{HASH_LOADER}]",
)


def make_server(address, kwargs):
    """verl's server actor, on the host with this address."""
    from verl.workers.rollout.sglang_rollout import async_sglang_server as verls

    from verl_sglang_sync.verl.replica import WeightSyncHttpServer

    verls.ray.util.get_node_ip_address = lambda: address  # Ray's, of the node
    return WeightSyncHttpServer(**kwargs)


@dataclass
class Launched:
    """The replica and what is around it: `servers` are its actors' processes, one on each host."""

    hosts: tuple[Host, Host]
    folder: Path
    router: RouterProcess
    replica: Any = None
    servers: list[Remote] = field(default_factory=list)

    @property
    def url(self):
        return f"http://{self.replica.server_address}"

    def make_actor(self, **kwargs):
        """The next actor, on the next host."""
        number = len(self.servers)
        host = self.hosts[number]
        process = Remote(
            partial(make_server, host.address, kwargs),
            environment={**environment("cpu", 2), **host.environment},
            log=self.folder / f"actor{number}.log",
            command=host.prefix,
        )
        self.servers.append(process)
        results_of(finish([process], START_TIMEOUT_S))
        return Handle(partial(asyncio.to_thread, self.call, number))

    def call(self, number, name, *args, **kwargs):
        """A method of an actor."""
        process = self.servers[number]
        process.begin(lambda server: getattr(server, name)(*args, **kwargs))
        return results_of(finish([process], START_TIMEOUT_S))[0]

    def kill_servers(self):
        for process in self.servers:
            process.kill()
            process.end()

    def ranks(self):
        return Ranks(self.folder, [self.url], tp=2, hosts=self.hosts)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    make_assets(folder)
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        router = RouterProcess(folder / "router.log", hosts[0].address, hosts[0].prefix)
        stack.callback(router.end)
        recipe = compose(
            "+weight_sync=flattened",
            f"actor_rollout_ref.model.path={folder}/model",
            f"{SECTION}.router_url='{router.url}'",
            *ENGINE,
        )
        made = Launched(hosts, folder, router, hybrid_replica(recipe))
        stack.callback(made.kill_servers)
        made.replica.server_class = ActorClass(made.make_actor)
        deadline = threading.Timer(START_TIMEOUT_S, made.kill_servers)  # then there is a log
        deadline.start()
        try:
            asyncio.run(made.replica.launch_servers())
        finally:
            deadline.cancel()
        yield made


def test_two_hosts_make_one_engine_with_one_server(launched):
    address, port = launched.call(0, "get_server_address")
    assert address == launched.hosts[0].address
    bracketed = f"[{address}]" if ":" in address else address
    assert launched.url == f"http://{bracketed}:{port}"
    with pytest.raises(AssertionError, match="http server is not launched"):
        launched.call(1, "get_server_address")
    pids = [server.process.pid for server in launched.servers]
    for rank, pid in enumerate(pids):
        titles = [" ".join(child.cmdline()) for child in psutil.Process(pid).children()]
        schedulers = [title.strip() for title in titles if "scheduler" in title]
        assert len(schedulers) == 1 and schedulers[0].endswith(f"TP{rank}"), titles
    networks = {Path(f"/proc/{pid}/ns/net").readlink() for pid in pids}
    assert len(networks) == (2 if launched.hosts[0].prefix else 1)


def test_the_server_has_joined_its_router(launched):
    assert launched.router.workers() == [launched.url]


def hashes(rank):
    """Of an engine whose TP ranks are on the trainer ranks' hosts; collective.

    Each TP rank gets its tensor from the trainer rank of its host: they share no memory else.
    """
    tensor, handles = torch.zeros(1), [b""] * rank.tp
    torch.distributed.all_gather_object(handles, serialize_handles([(str(rank.folder), tensor)]))
    if rank.is_leader:
        rank.client.run(operations.update_weights(handles, load_format=HASH_LOADER))
    torch.distributed.barrier()
    return read_hashes(rank.folder, rank.tp)


def sync(rank, scale):
    assert sync_error(rank.kept_manager("flattened"), iter(rank.weights(scale)), str(scale)) is None


def test_one_update_reaches_both_hosts(launched):
    with launched.ranks() as ranks:
        at_first = ranks.run(hashes)[0]
        ranks.run(sync, 0.5)
        halved = ranks.run(hashes)[0]
        ranks.run(sync, 1.0)
        assert ranks.run(hashes)[0] == at_first
    for before, after in zip(at_first, halved, strict=True):
        assert all(after[name] != before[name] for name in before if name.endswith("weight"))
    assert at_first[0] != at_first[1], "the ranks have shards of their own"


def sends(rank, url, address):
    """Sharded weights go to the engine, away and back until they are sent: what it had after each
    sync, and the last report. The group meets at the first rank's address.
    """
    sender, export, seen = (
        Sender(rank, [(url, 2)], address=address),
        ShardedExport(rank.weights()),
        [],
    )
    for scale in (1.0, 0.5, 1.0, 0.5, 1.0):
        export.write(rank.weights(scale))
        report = sender.sync(export.reexport(), "compiled")
        seen.append(hashes(rank))
    sender.close()
    return seen, report


def test_ranks_of_two_hosts_send_to_both(launched):
    with launched.ranks() as ranks:
        seen, report = ranks.run(sends, launched.url, launched.hosts[0].address)[0]
    first, halved, *others = seen
    assert others == [first, halved, first]
    assert halved != first
    assert report["num_sent"] == report["num_buckets"]
    assert all(min(sent) > 0 for sent in report["pair_bytes"]), "also to the other host"


def test_a_killed_actors_server_leaves_its_router(launched):
    launched.kill_servers()
    deadline = time.monotonic() + 30
    while launched.router.workers() != []:
        assert time.monotonic() < deadline, "it is still among the router's workers"
