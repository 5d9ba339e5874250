"""verl's launch of a replica with our classes, in this process, up to SGLang's own processes.

Each server actor is a plain object here, and what would start processes is written down: the
arguments that SGLang gets (before it derives others from them), and where HTTP servers start.

    with captured_launch(["10.0.0.1", "10.0.0.2"]) as launched:
        asyncio.run(launch_replica(recipe, nnodes=2))
    launched[1].arguments["node_rank"]
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from verl_sglang_sync.verl.upstream import fields

MASTER_PORT = 29345
HTTP_PORT = 30001


@dataclass
class Launched:
    """What one server actor of the replica did.

    Attributes:
        host: its address.
        arguments: what reached SGLang's `ServerArgs`, by field.
        http_servers: addresses at which it started an HTTP server.
        environment: what SGLang's processes would have inherited.
    """

    host: str
    arguments: dict[str, Any] = field(default_factory=dict)
    http_servers: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


_current: ContextVar[Launched] = ContextVar("_current")  # whose server actor is running


class Method:
    """A method as an actor's handle has it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        result = self._method(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result


class Handle:
    """In the place of an actor's handle: `call(name, *args, **kwargs)` runs its methods."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __getattr__(self, name: str) -> Method:
        return Method(partial(self.call, name))


class ActorClass:
    """In the place of `ray.remote(class)`: `make(**kwargs)` makes a handle."""

    def __init__(self, make: Callable[..., Handle]) -> None:
        self._make = make

    def options(self, **_: Any) -> ActorClass:
        """Where verl says on which node."""
        return self

    def remote(self, **kwargs: Any) -> Handle:
        return self._make(**kwargs)


def _local_actor(actor_class: type[Any], **kwargs: Any) -> Handle:
    """An actor in this process."""
    made = actor_class(**copy.deepcopy(kwargs))  # Ray pickles them
    launched = _current.get()

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        _current.set(launched)  # of this task alone
        return getattr(made, name)(*args, **kwargs)

    return Handle(call)


class Worker:
    """A trainer worker on a node of its own, of which verl asks where it runs."""

    def __init__(self, rank: int) -> None:
        self._node = f"{rank + 1:056x}"

    @property
    def __ray_call__(self) -> Method:
        return Method(lambda _function: (self._node, "0"))


@contextlib.contextmanager
def captured_launch(hosts: Sequence[str]) -> Iterator[list[Launched]]:
    """Write down what the replicas launched in this block do; one entry per server, in order."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import common
    from verl.workers.rollout.sglang_rollout import async_sglang_server as verls

    launched: list[Launched] = []

    def address() -> str:
        launched.append(Launched(hosts[len(launched)]))
        _current.set(launched[-1])
        return launched[-1].host

    def launch(server_args: Any, **_: Any) -> tuple[Any, ...]:
        reached = {f.name: getattr(server_args, f.name) for f in fields(ServerArgs)}
        _current.get().arguments = reached
        _current.get().environment = dict(os.environ)
        return mock.Mock(), mock.Mock(), mock.Mock()

    async def serve(_app: Any, _server_args: Any, host: str) -> tuple[int, Any]:
        _current.get().http_servers.append(host)
        return HTTP_PORT, None

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.dict(os.environ))
        patch(mock.patch.object(verls.ray.util, "get_node_ip_address", address))
        patch(mock.patch.object(verls, "get_free_port", lambda *_, **__: (MASTER_PORT, None)))
        patch(mock.patch.object(verls, "set_global_state"))
        patch(mock.patch.object(verls, "app"))
        patch(mock.patch.object(common, "add_prometheus_middleware"))
        patch(mock.patch.object(verls, "run_uvicorn", serve))
        patch(mock.patch.object(engine, "_set_envs_and_config"))
        patch(mock.patch.object(ServerArgs, "__post_init__", lambda _self: None))
        patch(mock.patch.object(engine.Engine, "_launch_subprocesses", launch))
        yield launched


def hybrid_replica(recipe: Any) -> Any:
    """The hybrid replica that verl makes of the recipe, of one GPU per node."""
    from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry

    replica = RolloutReplicaRegistry.get("sglang")(
        replica_rank=0,
        config=recipe.actor_rollout_ref.rollout,
        model_config=recipe.actor_rollout_ref.model,
        gpus_per_node=1,
    )
    replica.rollout_mode = RolloutMode.HYBRID
    replica.workers = [Worker(rank) for rank in range(replica.world_size)]
    return replica


async def launch_replica(recipe: Any, *, nnodes: int) -> None:
    """The recipe's replica, launched with our server class, which is taken out of its `ray.remote`
    and run here.
    """
    replica = hybrid_replica(recipe)
    assert replica.nnodes == nnodes
    actor_class = replica.server_class.__ray_metadata__.modified_class
    replica.server_class = ActorClass(partial(_local_actor, actor_class))
    await replica.launch_servers()
