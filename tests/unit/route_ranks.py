"""One trainer rank in the tests of routes: real FSDP2 models, verl's own export, syncs on gloo."""

import types
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard

from unit.serving_engine import ServingEngine, colocated, synced
from unit.trainer_ranks import trainer_ranks
from verl_sglang_sync import WeightSyncError
from verl_sglang_sync.routes.route import Recovery
from verl_sglang_sync.routes.table import table_source
from verl_sglang_sync.sources.export import unquantized

CPU = torch.device("cpu")
TP = 2
BUCKET_BYTES = 20 << 10
ROUND_BYTES = 4 << 10
LONG_COPY_BYTES = table_source.LONG_COPY_BYTES
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


def _mixtral():
    """Its checkpoint has each expert apart, under other names."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    return AutoModelForCausalLM.from_config(
        MixtralConfig(**_SIZES, num_local_experts=6, num_experts_per_tok=2)
    )


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


MODELS = {
    "dense": lambda: _dense(False),
    "tied": lambda: _dense(True),
    "moe": _moe,
    "mixtral": _mixtral,
    "vl": _vl,
}


def sharded(kind, dtype=torch.float32, strategy="fsdp2", **options):
    """A tiny model, equal on all ranks, sharded over them as verl does; one bucket to a layer."""
    torch.manual_seed(7)
    model = MODELS[kind]().to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    if strategy == "fsdp2":
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    is_layer = partial(transformer_auto_wrap_policy, transformer_layer_cls=set(map(type, layers)))
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=is_layer, device_mesh=mesh, device_id=CPU, **options
    )
    FullyShardedDataParallel.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT)
    return wrapped


def local_of(tensor):
    """This rank's part of a parameter, or all of a tensor that is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def export_of(model, method=None, *, is_offloaded=False):
    """What verl's FSDP engine exports, or another `method` of one, as our adapter gets it."""
    from verl.workers.engine.fsdp import transformer_impl

    from verl_sglang_sync.verl.exports import _repeatable

    # In these processes verl finds no accelerator, and each iteration asks for it again.
    transformer_impl.get_device_id = lambda: CPU
    transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
    transformer_impl.load_fsdp_model_to_gpu = lambda _: None
    engine = types.SimpleNamespace(
        module=model,
        model_config=types.SimpleNamespace(lora={}, hf_config=model.config),
        _uses_fsdp2_cpu_offload_policy=False,
        _is_offload_param=is_offloaded,
        _qat_enabled=False,
    )
    method = method or transformer_impl.FSDPEngine.get_per_tensor_param
    return _repeatable(getattr(method, "__wrapped__", method))(engine)[0]


def full_tensors(export):
    """Return what an export gives, by name, with one collective for all of its tensors.

    `DTensor.full_tensor` costs milliseconds of CPU time, and tests compare many whole models. The
    export is iterated twice: to list what it gathers, and with that gathered, as it may copy it.
    """
    sharded = []

    def full_tensor(tensor, **_):
        assert tensor.placements == (Shard(0),), tensor.placements
        sharded.append((tensor.to_local(), torch.empty(tensor.shape, dtype=tensor.dtype)))
        return sharded[-1][1]

    with mock.patch.object(DTensor, "full_tensor", full_tensor):
        for _ in export:
            pass
    world, everyones_rows = dist.get_world_size(), []
    for rank in range(world):
        sizes = [-(-len(full) // world) for _, full in sharded]  # in rows, as `torch.chunk` cuts
        cut = zip(sizes, sharded, strict=True)
        everyones_rows.append([full[rank * size : (rank + 1) * size] for size, (_, full) in cut])
    memory = [local.contiguous().flatten().view(torch.uint8) for local, _ in sharded]
    num_bytes = max(sum(rows.nbytes for rows in held) for held in everyones_rows)
    own = torch.zeros(num_bytes, dtype=torch.uint8)
    torch.cat(memory, out=own[: sum(len(part) for part in memory)])
    everyones = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyones, own)
    for memory, held in zip(everyones, everyones_rows, strict=True):
        offset = 0
        for rows in held:
            part = memory[offset : offset + rows.nbytes].clone()  # aligned as its type wants
            rows.copy_(part.view(rows.dtype).view(rows.shape))
            offset += rows.nbytes
    gathered = iter([full for _, full in sharded])
    with mock.patch.object(DTensor, "full_tensor", lambda *_, **__: next(gathered)):
        return dict(export)


def exported_tensors(export):
    """Return what an export gives, by name, also if it is quantised."""
    tensors, made = full_tensors(unquantized(export)), getattr(export, "quantized", None)
    return tensors if made is None else dict(made.quantize(tensors.items()))


def parts_of(name, tensor, rank):
    """What an engine rank keeps of a tensor: a share of rows, columns or experts, or even less."""
    if ".experts." in name:
        expert = int(name.partition(".experts.")[2].partition(".")[0])
        return [tensor] if expert % TP == rank else []
    if tensor.dim() < 2 or len(tensor) < TP:
        return [tensor]
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return [tensor.chunk(TP, dim=-1)[rank]]
    if "lm_head" in name:
        return [tensor[::2], tensor[:, -1:]]
    return [tensor.chunk(TP)[rank]]


class EngineModel(torch.nn.Module):
    """The model of one of an engine's `TP` ranks: its parts of all tensors of an export."""

    def __init__(self, rank, export):
        super().__init__()
        self.rank = rank
        self.parts = {n: [p.clone() for p in parts_of(n, t, rank)] for n, t in export}
        held = [part for parts in self.parts.values() for part in parts]
        self.held = torch.nn.ParameterList(torch.nn.Parameter(p, requires_grad=False) for p in held)
        self.adds = None  # to its sources, in place

    def load_weights(self, weights):
        for name, tensor in weights:
            if self.adds is not None:
                tensor.add_(self.adds)
            parts = parts_of(name, tensor, self.rank)
            for target, part in zip(self.parts[name], parts, strict=True):
                target.copy_(part)

    def wrong(self, export):
        """Names of the tensors of which it has other parts."""
        return [
            name
            for name, tensor in export.items()
            for have, want in zip(self.parts[name], parts_of(name, tensor, self.rank), strict=True)
            if not torch.equal(bytes_of(have), bytes_of(want))
        ]


def bytes_of(tensor):
    """Return a tensor's bytes. Numbers of 8 bits cannot be compared."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@dataclass
class Seen:
    """What a rank saw of its syncs, one after the other.

    Attributes:
        routes: by which the good ones went: "export", "pull" or "exchange".
        wrong: what the engine on this rank had got wrongly after those; nothing without one.
        num_exports: how often each parameter was gathered in those with an export.
        num_gathers: calls of `full_tensor` in those without one.
        errors: of those that failed.
        recoveries: how syncs by routes that did not hold were made again.
        num_handles: that were made for engines, by sync.
        keeps: the engines keep mapped what was pulled last.
        off: why the route is not taken.
        state: of the route.
        proven: of the good ones.
        report: of the last good one.
    """

    routes: list[str] = field(default_factory=list)
    wrong: list[list[str]] = field(default_factory=list)
    num_exports: list[float] = field(default_factory=list)
    num_gathers: int = 0
    errors: list[str] = field(default_factory=list)
    recoveries: list[str] = field(default_factory=list)
    num_handles: list[int] = field(default_factory=list)
    keeps: bool = False
    off: str | None = None
    state: str = ""
    proven: list[bool | None] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


def engine_and_sync(exported, *, bucket_bytes, routes, model=EngineModel, **keys):
    """The engine that this trainer rank leads, or None, and its weight sync, which may learn.

    Args:
        exported: names and tensors that the engine has at first.
        model: makes the model of an engine rank.
        keys: of the preset.
    """
    ranks, is_leader = trainer_ranks(TP)
    engine = ServingEngine(tp=TP) if is_leader else None
    if engine is not None:
        engine.models = [model(rank, exported) for rank in range(TP)]
    keys = {"manifest_check": "off", "free_cache_engine": False, **keys}
    sizes = {"bucket_bytes": bucket_bytes, "routes": routes}
    return engine, colocated(engine, "compiled", ranks, **sizes, **keys)


class Rank:
    """One rank of a trainer that syncs one model to real sessions of engines with `TP` ranks.

    Args:
        route: "pull" or "exchange", the wire that is not switched off, or "both".
        kind: of the model.
        strategy: "fsdp2", or "fsdp1".
        is_shared: the parameters are in memory that engines can map.
        is_offloaded: verl offloads them.
    """

    def __init__(
        self,
        route,
        kind,
        *,
        prove=0,
        dtype="float32",
        is_shared=True,
        is_offloaded=False,
        strategy="fsdp2",
        lists_late=False,
        **keys,
    ):
        # 0: as for a large model. Set for each rank, as its process is used for other tests.
        table_source.LONG_COPY_BYTES = 0 if lists_late else LONG_COPY_BYTES
        self.name, self.model = route, sharded(kind, getattr(torch, dtype), strategy)
        if is_shared:
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                local_of(tensor).untyped_storage().share_memory_()
        self.export = self.exports(export_of(self.model, is_offloaded=is_offloaded))
        self.engine, self.weight_sync = engine_and_sync(
            list(exported_tensors(self.export).items()),
            bucket_bytes=BUCKET_BYTES,
            routes=["pull", "exchange"] if route == "both" else [route],
            prove_every_n_syncs=prove,
            **keys,
        )
        self.route = self.weight_sync._route
        assert self.route._round_bytes > ROUND_BYTES, "a setting that is read"
        self.route._round_bytes = ROUND_BYTES
        self.seen, self._kept, self._num_handles, self._has_stepped = Seen(), [], 0, False
        record, recover = self.route._record, self.route.recover

        def recorded(handle):
            self._num_handles += 1
            record(handle)

        def recovered(cause, weights):
            self.seen.recoveries.append(recover(cause, weights).name)
            return Recovery[self.seen.recoveries[-1]]

        self.route._record, self.route.recover = recorded, recovered

    def exports(self, export):
        """Make what this rank exports of verl's export."""
        return export

    def sync(self):
        report, num_calls, gather = None, 0, DTensor.full_tensor

        def counted(tensor, **more):  # a mock would keep the tensors until they are collected
            nonlocal num_calls
            num_calls += 1
            return gather(tensor, **more)

        with mock.patch.object(DTensor, "full_tensor", counted):
            try:
                report = synced(self.weight_sync, self.export)
            except WeightSyncError as failed:
                self.seen.errors.append(str(failed))
            except KeyboardInterrupt:
                self.seen.errors.append("interrupted")
        seen = self.seen
        seen.num_handles.append(self._num_handles)
        seen.keeps = self.route._locations is not None
        seen.state, seen.off = self.route.state.name, self.route.reason
        if report is not None:
            counts = {"pull": report.num_pulled, "exchange": report.num_exchanged}
            seen.routes.append(next((name for name, num in counts.items() if num), "export"))
            seen.wrong.append(self.wrong())
            seen.report = asdict(report)
            seen.proven.append(report.is_proven)
            if seen.routes[-1] == "export":
                num_sharded = sum(isinstance(t, DTensor) for t in self.model.state_dict().values())
                seen.num_exports.append(num_calls / num_sharded)
            elif report.is_proven is None:
                seen.num_gathers += num_calls

    def ask(self, wants_proof, on=0):
        """A user asks the engine of one leader for a proof, or no user does any more."""
        if dist.get_rank() == on:
            self.engine.wants_proof = wants_proof

    def wrong(self):
        """What this rank's engine has other than the export would give now."""
        full = exported_tensors(self.export)
        assert any(bytes_of(tensor).any() for tensor in full.values())
        models = self.engine.models if self.engine is not None else ()
        return [name for model in models for name in model.wrong(full)]

    def sync_failing(self, on, target, error):
        """A sync in which the function `target` fails on one rank; None: on all."""
        fails = mock.patch(target, side_effect=error)
        with fails if on in (None, dist.get_rank()) else nullcontext():
            self.sync()

    def step(self):
        """As an optimizer: in place, another value for each element."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = local_of(parameter)
                before = local.clone()
                local.add_(torch.arange(local.numel(), dtype=local.dtype).view(local.shape) + 1)
                assert not (local == before).any()
        if not self._has_stepped:  # `wrong` is half of the cost of a sync
            assert self.wrong() or self.engine is None, "the control"
        self._has_stepped = True

    def move(self, on=None, number=None, offset=0):
        """Other storages for shards, with the same values, as offloading and loading do.

        Args:
            on: which rank's; None: those of all.
            number: of the one parameter that moves; None: all do.
            offset: of the shard in its storage, in elements; another one makes it another
                parameter.
        """
        for i, parameter in enumerate(self.model.parameters()):
            if on in (None, dist.get_rank()) and number in (None, i):
                local = parameter._local_tensor.detach()
                self._kept.append(local)  # alive: nothing new can be where it is
                moved = local.new_empty(local.numel() + offset)[offset:].view(local.shape)
                parameter._local_tensor = moved.copy_(local)
                moved.untyped_storage().share_memory_()
                local.fill_(7)


def play(pool, kind, options, *steps):
    """Run ranks through steps; what each saw of its syncs, which were right, and of which none
    without an export gathered.

    Args:
        pool: of the ranks.
        kind: class of a rank.
        options: of its constructor.
        steps: names of methods, or names with arguments.
    """
    answers = pool.run(_play, kind, options, *steps)
    for seen in answers:
        assert not any(seen["wrong"])
        assert seen["num_gathers"] == 0
    return answers


def _play(kind, options, *steps):
    rank = kind(**options)
    for step in steps:
        name, *arguments = (step,) if isinstance(step, str) else step
        getattr(rank, name)(*arguments)
    return asdict(rank.seen)
