"""One trainer rank in the tests of routes: real FSDP2 models, verl's own export, syncs on gloo."""

import types
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sglang_loader.common.shared_memory import host_id
from unit.trainer_ranks import trainer_group

CPU = torch.device("cpu")
HOST = host_id()
BUCKET_BYTES = 20 << 10
_SIZES = {
    "vocab_size": 83,  # 4 ranks have 21, 21, 21, 20 rows
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 40,
}


def _dense(tied):
    from transformers import AutoModelForCausalLM, Qwen3Config

    return AutoModelForCausalLM.from_config(Qwen3Config(**_SIZES, tie_word_embeddings=tied))


def _moe():
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **_SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12
    )
    return AutoModelForCausalLM.from_config(config)


def _vl():
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_heads": 2,
        "out_hidden_size": 24,
        "patch_size": 2,
    }
    text = {**_SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    return AutoModelForImageTextToText.from_config(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    )


MODELS = {"dense": lambda: _dense(False), "tied": lambda: _dense(True), "moe": _moe, "vl": _vl}


def sharded(kind, dtype=torch.float32):
    """A tiny model, equal on all ranks, sharded over them as verl does; one bucket to a layer."""
    torch.manual_seed(7)
    model = MODELS[kind]().to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def export_of(model):
    """What verl's FSDP engine exports, as our adapter gets it."""
    from verl.workers.engine.fsdp import transformer_impl

    from verl_sglang_sync.verl.exports import _repeatable

    # In these processes verl finds no accelerator, and each iteration asks for it again.
    transformer_impl.get_device_id = lambda: CPU
    transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
    engine = types.SimpleNamespace(
        module=model,
        model_config=types.SimpleNamespace(lora={}, hf_config=model.config),
        _uses_fsdp2_cpu_offload_policy=False,
        _is_offload_param=False,
        _qat_enabled=False,
    )
    method = transformer_impl.FSDPEngine.get_per_tensor_param
    return _repeatable(getattr(method, "__wrapped__", method))(engine)[0]


def loaded(may_read=True):
    """What an engine rank says that has loaded an exported sync."""
    from sglang_loader.common.session.messages import Loaded

    return Loaded(
        num_replayed=0,
        num_eager=1,
        reason=None,
        may_read_in_place=may_read,
        host=HOST,
        arrangements=None,
        seconds={},
    )


@dataclass
class Seen:
    """What a rank saw.

    Attributes:
        routes: what each sync was: "export", "pull" or "exchange".
        wrong: what an engine on this rank would have got wrongly, by sync without an export.
        num_gathers: calls of `full_tensor` in those.
        recoveries: after syncs that failed.
        errors: of this rank in those.
        off: why the route is not taken.
        counts: whatever else was counted.
    """

    routes: list[str] = field(default_factory=list)
    wrong: list[list] = field(default_factory=list)
    num_gathers: int = 0
    recoveries: list[str] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    off: str | None = None
    counts: dict[str, int] = field(default_factory=dict)


class Rank:
    """The syncs of one model on this rank, by one route or with the full export.

    Args:
        model: of this rank, or its kind.
        dtype: of one that is made.
        change: of the export, in what is traced.
        recheck: `recheck_every_n_syncs`.

    Attributes:
        readers: this rank's engine ranks.
        num_engines: how many it has.
    """

    num_engines = 1
    readers: Any = ()

    def __init__(self, model, change=None, recheck=0, dtype="float32"):
        from verl_sglang_sync.routes.route import RouteContext
        from verl_sglang_sync.sources.export import transformed

        self.model = sharded(model, getattr(torch, dtype)) if isinstance(model, str) else model
        self.group = trainer_group(2)[0]
        self.export = export_of(self.model)
        self.learnt_from = self.export if change is None else transformed(self.export, change)
        settings = SimpleNamespace(bucket_bytes=BUCKET_BYTES, recheck_every_n_syncs=recheck)
        self.context = RouteContext(self.group, CPU, settings, lambda: self.readers)
        self.stream = self.context.stream
        self.seen = Seen()
        self.route = self.make_route()

    def make_route(self):
        """The route under test."""
        raise NotImplementedError

    def read(self, source):
        """As an engine: take what the source of one sync offers, and keep it for `compare`."""
        raise NotImplementedError

    def compare(self):
        """What is wrong with what was read last."""
        raise NotImplementedError

    def sync(self, *, may_read=True):
        """One sync as a transport would make it, again where a route does not hold."""
        from verl_sglang_sync.routes.route import Recovery

        source = self.route.choose(self.export, self.report())
        if source is None:
            self.export_in_full(may_read)
            return
        cause = None
        try:
            self.group.all_gather(None)  # all have written what they export
            with mock.patch.object(DTensor, "full_tensor", autospec=True) as gather:
                self.read(source)
            self.seen.num_gathers += gather.call_count
        except Exception as error:
            cause = error
        source.drain()
        self.route.rest()
        self.seen.errors.append(cause and str(cause))
        if all(each is None for each in self.group.all_gather(cause and repr(cause))):
            source.end()
            self.seen.routes.append(type(self.route).__name__.lower())
            self.seen.wrong.append(self.compare())
            return
        recovery = self.route.recover(cause, self.export)
        self.seen.recoveries.append(recovery.name)
        if recovery is Recovery.AGAIN:
            self.sync()
        elif recovery is Recovery.EXPORT:
            self.export_in_full(may_read)

    def export_in_full(self, may_read=True):
        """A good exported sync, and what is learnt from it."""
        self.batches()
        self.seen.routes.append("export")
        if self.route.can_learn(self.learnt_from):
            self.route.learn(self.learnt_from, [loaded(may_read)] * self.num_engines)
        self.seen.off = self.route.off

    def batches(self):
        """The export in full, as buckets."""
        from verl_sglang_sync.sources.export import Export

        return list(self.stream.batches(Export(self.export), self.report()))

    @staticmethod
    def report():
        from verl_sglang_sync.report import SyncReport

        return SyncReport(mode="compiled", replica=0)

    def step(self):
        """As an optimizer: in place, another value for each element."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local()
                local.add_(torch.arange(local.numel(), dtype=local.dtype).view(local.shape) + 1)


def play(kind, options, *steps):
    """Run a rank through steps; what it saw.

    Args:
        kind: class of the rank.
        options: of its constructor.
        steps: names of methods, or names with arguments.
    """
    rank = kind(**options)
    for step in steps:
        name, *arguments = (step,) if isinstance(step, str) else step
        getattr(rank, name)(*arguments)
    return asdict(rank.seen)
