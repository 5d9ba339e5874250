"""Custom weight loaders that load nothing, for a look into an engine's processes from a test.

Each runs in every scheduler process, when an update names it, and is told what to do by the name of
its one tensor. `support.served.Served.ask` makes such updates.
"""

import functools
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

HASH_LOADER = "support.engine_loaders.write_hashes"
STOP_LOADER = "support.engine_loaders.stop_in_next_load"
COUNT_LOADER = "support.engine_loaders.count_loads"
HOST_LOADER = "support.engine_loaders.live_on"
PAUSE_LOADER = "support.engine_loaders.pause_before_bucket"
FAIL_LOADER = "support.engine_loaders.fail_before_joining"

NamedTensors = list[tuple[str, torch.Tensor]]


def write_hashes(model: Any, named_tensors: NamedTensors) -> None:
    """Add a line `{tensor name: sha256}`, of what the engine really computes with, to the file
    `rank<n>.json` of the folder that is named: of a draft, and then of the target.
    """
    rank = torch.distributed.get_rank()
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    with ThreadPoolExecutor() as pool:  # one thread takes 5 s for 2 GB
        hashes = dict(zip(state, pool.map(hash_of, state.values()), strict=True))
    with Path(named_tensors[0][0], f"rank{rank}.json").open("a") as file:
        file.write(json.dumps(hashes) + "\n")


def hash_of(tensor: torch.Tensor) -> str:
    """sha256 of the elements' bytes, in row-major order."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.cpu().numpy()).hexdigest()


def stop_in_next_load(model: Any, _: NamedTensors) -> None:
    """Have the process stop itself, once, by SIGSTOP as it enters the model's own `load_weights`;
    whoever asked for it sends SIGCONT.
    """
    original = model.load_weights
    has_stopped = False

    def load_weights(*arguments: Any, **options: Any) -> Any:
        nonlocal has_stopped
        vars(model).pop("load_weights", None)  # the class's own comes to light again
        if not has_stopped:  # whoever keeps this wrapper
            has_stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*arguments, **options)

    model.load_weights = load_weights


_loads = {"begun": 0, "done": 0, "nth": 0, "seconds": 0.0}


def live_on(_: Any, named_tensors: NamedTensors) -> None:
    """Take this process to be on the host that is named, "here": where it is, "apart N": on one of
    hosts with N GPUs each, named after its GPU, or after its TP rank where there is none.
    """
    from sglang_loader.common.shared_memory import host_id
    from sglang_loader.session import serve

    host = named_tensors[0][0]
    if host.startswith("apart"):
        on_gpus, ranks = torch.cuda.is_available(), torch.distributed
        place = torch.cuda.current_device() if on_gpus else ranks.get_rank()
        host = f"host {place // int(host.split()[1])}"
    serve.host_id = host_id if host == "here" else lambda: host


def count_loads(model: Any, named_tensors: NamedTensors) -> None:
    """Write how many sessions were loaded since the last call to `<folder>/loads<rank>.json`, and
    have the nth later one take `seconds` longer. Told by JSON: `folder`, `nth`, `seconds`.
    """
    from sglang_loader.hooks import weights

    if not hasattr(weights._serve_session, "__wrapped__"):
        weights._serve_session = _counted(weights._serve_session)
    order = json.loads(named_tensors[0][0])
    rank = torch.distributed.get_rank()
    Path(order["folder"], f"loads{rank}.json").write_text(json.dumps(_loads["done"]))
    _loads.update(begun=0, done=0, nth=order["nth"], seconds=order["seconds"])


def _counted(serve: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(serve)
    def counting(*arguments: Any, **options: Any) -> Any:
        _loads["begun"] += 1
        if _loads["begun"] == _loads["nth"]:
            time.sleep(_loads["seconds"])
        failures = serve(*arguments, **options)
        _loads["done"] += not failures  # a session that is refused, or fails, returns why
        return failures

    return counting


def pause_before_bucket(_: Any, named_tensors: NamedTensors) -> None:
    """Pause the next session, once, before this rank loads the bucket of an index, or all shards.

    The pause begins with the file `<folder>/paused<rank>` and ends with `<folder>/go`. The order
    is JSON with `folder` and `index`.
    """
    from sglang_loader.session.model_loader import ModelLoader

    order, originals = json.loads(named_tensors[0][0]), (ModelLoader.load, ModelLoader.load_shards)
    folder, rank = Path(order["folder"]), torch.distributed.get_rank()

    def pause() -> None:
        ModelLoader.load, ModelLoader.load_shards = originals
        (folder / f"paused{rank}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)

    def load(self: Any, index: int, *arguments: Any) -> bool:
        if index == order["index"]:
            pause()
        return originals[0](self, index, *arguments)

    def load_shards(self: Any, shards: Any) -> bool:
        pause()
        return originals[1](self, shards)

    ModelLoader.load, ModelLoader.load_shards = load, load_shards


def fail_before_joining(_: Any, named_tensors: NamedTensors) -> None:
    """Have the next session of the TP rank that is named fail before it is made, once."""
    from sglang_loader.session import serve

    original = serve.loader_of

    def fail(_: Any) -> Any:
        serve.loader_of = original
        raise RuntimeError("planted before the session")

    if torch.distributed.get_rank() == int(named_tensors[0][0]):
        serve.loader_of = fail
