"""What each rank does in the tests of the exchange of shards: real FSDP2, verl's own export."""

import dataclasses
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from sglang_loader.common.regions.arrangement import Arrangement, Read
from unit.trainer_ranks import trainer_group

CPU = torch.device("cpu")
BUCKET_BYTES = 20 << 10
PIECE_BYTES = 2 << 10
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


def batches_of(export):
    """The export in full, as buckets."""
    from verl_sglang_sync.report import SyncReport
    from verl_sglang_sync.sources.bucket_stream import BucketStream
    from verl_sglang_sync.sources.export import Export

    stream, report = BucketStream(BUCKET_BYTES), SyncReport(mode="compiled", replica=0)
    return list(stream.batches(Export(export), report))


def arrangement_of(layout, rank, world_size):
    """What an engine with tensor and expert parallelism might read of a bucket, and less even."""
    reads, start = [], 0
    for i, tensor in enumerate(layout.tensors):
        *_, width = tensor.shape or (1,)
        row = width * tensor.dtype.itemsize
        rows = tensor.nbytes // row if row else 0
        share = -(-rows // world_size)
        first, last = min(rank * share, rows), min((rank + 1) * share, rows)
        columns = width // world_size * tensor.dtype.itemsize
        if ".experts." in tensor.name:
            expert = int(tensor.name.partition(".experts.")[2].partition(".")[0])
            found = [(0, (), tensor.nbytes)] if expert % world_size == rank else []
        elif tensor.name.endswith(("o_proj.weight", "down_proj.weight")) and columns:
            found = [(rank * columns, ((rows, row),), columns)]
        elif len(tensor.shape) == 1:
            found = [(0, (), tensor.nbytes)]
        elif "lm_head" in tensor.name:  # every other row, then a column alone
            found = [(0, ((rows // 2, 2 * row),), row)]
            found += [(row - tensor.dtype.itemsize, ((rows, row),), tensor.dtype.itemsize)]
        else:
            found = [(first * row, (), (last - first) * row)]
        for offset, dims, run in found:
            reads.append(Read(i, offset, dims, run, start))
            start += reads[-1].nbytes
            start += -start % (256 if i % 3 else tensor.dtype.itemsize)
    return Arrangement(tuple(reversed(reads)), start)


@dataclass
class Seen:
    """What a rank saw.

    Attributes:
        reason: of `prepare`, or of `prove`.
        kinds: of the syncs.
        wrong: buckets that were not as the full export's, by sync.
        arranged_bytes: of this rank's buffers, without scratch.
        payload_bytes: of the export.
        num_gathers: calls of `full_tensor` while shards were exchanged.
        scratch_bytes: at most held.
    """

    reason: str | None = None
    kinds: list[str] = field(default_factory=list)
    wrong: list[list[int]] = field(default_factory=list)
    arranged_bytes: int = 0
    payload_bytes: int = 0
    num_gathers: int = 0
    num_buckets: int = 0
    scratch_bytes: int = 0


class Rank:
    """An exchange of one model on this rank."""

    def __init__(self, model, change=None, recheck=0):
        from verl_sglang_sync.routes.exchange.shard_exchange import ShardExchange
        from verl_sglang_sync.sources.reexport import transformed
        from verl_sglang_sync.sources.source_map import SourceMap

        self.model = model
        self.group = trainer_group(2)[0]
        self.export = export_of(model)
        self.batches = batches_of(self.export)
        if change is not None:
            self.export = transformed(self.export, change)
        world_size = dist.get_world_size()
        self.layouts = [batch.bucket.layout for batch in self.batches]
        self.arrangements = [
            [arrangement_of(layout, rank, world_size) for layout in self.layouts]
            for rank in range(world_size)
        ]
        self.source_map = SourceMap(self.group, CPU)
        self.exchange = ShardExchange(
            self.group,
            CPU,
            self.source_map,
            piece_nbytes=PIECE_BYTES,
            recheck_every_n_syncs=recheck,
        )
        self.seen = Seen()
        self.own = self.arrangements[dist.get_rank()]
        self.seen.num_buckets = len(self.layouts)
        self.seen.arranged_bytes = sum(arranged.nbytes for arranged in self.own)
        self.seen.payload_bytes = sum(batch.bucket.payload_bytes for batch in self.batches)

    def prepare(self):
        self.seen.reason = self.exchange.prepare(self.export, self.arrangements, self.layouts)
        return self.seen.reason is None

    def sync(self):
        """One sync as a transport would make it; what was exchanged is compared afterwards."""
        from verl_sglang_sync.routes.exchange.self_check import gather_arranged

        is_ready = self.exchange.ready(self.export, self.layouts)
        is_checked = self.exchange.needs_proof
        self.seen.kinds.append("EXCHANGE" if is_ready else "CHECK" if is_checked else "FULL")
        if is_checked:
            batches = ((b.bucket.layout, b.tensors) for b in batches_of(self.export))
            self.seen.reason = self.exchange.prove(self.export, batches)
        if is_ready:
            buffers = [torch.zeros(a.nbytes, dtype=torch.uint8) for a in self.own]
            with mock.patch.object(DTensor, "full_tensor", autospec=True) as gather:
                for index, buffer in enumerate(buffers):
                    self.exchange.fill(index, buffer)
            self.seen.num_gathers += gather.call_count
            full = batches_of(self.export)
            expected = [
                gather_arranged(batch.tensors, arranged, CPU)
                for batch, arranged in zip(full, self.own, strict=True)
            ]
            assert any(buffer.any() for buffer in expected)
            pairs = enumerate(zip(buffers, expected, strict=True))
            self.seen.wrong.append([i for i, (have, want) in pairs if not torch.equal(have, want)])
        self.seen.scratch_bytes = max(self.seen.scratch_bytes, self.exchange.nbytes)
        self.exchange.free()
        return self.seen.kinds[-1]

    def step(self):
        """As an optimizer: in place, another value for each element."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local()
                local.add_(torch.arange(local.numel(), dtype=local.dtype).view(local.shape) + 1)


def exchange_model(kind, dtype):
    """Trace, check, exchange twice, with a step of the optimizer in between."""
    rank = Rank(sharded(kind, getattr(torch, dtype)))
    if rank.prepare():
        rank.sync()
        rank.step()
        rank.sync()
        rank.sync()
    return dataclasses.asdict(rank.seen)


class _Ring:
    """Staging buffers that are kept apart."""

    nbytes = 0

    def __init__(self):
        self.filled = []

    def prepare(self, cuts, *, arranged):
        pass

    def fill(self, index, nbytes, fill):
        self.filled.append(torch.zeros(nbytes, dtype=torch.uint8))
        fill(self.filled[-1])
        return self.filled[-1].untyped_storage()


class _Arranged:
    """One sync of a rank that knows all arrangements."""

    digest = "arranged"

    def __init__(self, arrangements):
        self._arrangements = arrangements

    def keep_if_held(self, held):
        assert held == self.digest

    def of(self, index, bucket):
        return self._arrangements[index]


def drain_on_rank_1():
    """Rank 1 gives up after one bucket; whether what this rank filled is right."""
    from verl_sglang_sync.report import SyncReport
    from verl_sglang_sync.routes.exchange.route import ExchangedBuckets
    from verl_sglang_sync.routes.exchange.self_check import gather_arranged

    rank = Rank(sharded("dense"))
    rank.prepare()
    rank.sync()
    is_ready = rank.exchange.ready(rank.export, rank.layouts)
    cuts = [types.SimpleNamespace(bucket=batch.bucket) for batch in rank.batches]
    ring, report = _Ring(), SyncReport(mode="compiled", replica=0)
    buckets = ExchangedBuckets(rank.exchange, cuts, _Arranged(rank.own), ring, report)
    buckets.engine_joined(_Arranged.digest)
    for bucket in buckets:
        if dist.get_rank() == 1:
            assert bucket.index == 0
            break
    buckets.drain()
    rank.exchange.free()
    full = batches_of(rank.export)
    expected = [gather_arranged(b.tensors, a, CPU) for b, a in zip(full, rank.own, strict=True)]
    right = [torch.equal(have, want) for have, want in zip(ring.filled, expected, strict=False)]
    return is_ready, right, report.num_exchanged, report.num_tensors


@contextmanager
def _failing_on_rank_1(rank, piece, packing):
    """One packing of one piece fails on rank 1."""
    broken = getattr(rank.exchange._prepared.exchange._pieces[piece], packing)
    fails = mock.Mock(side_effect=MemoryError("no room to pack"))
    with mock.patch.object(broken, "run", fails if dist.get_rank() == 1 else broken.run):
        yield


def fail_in_a_sync(piece, packing):
    """What each rank saw, and whether the next sync is right."""
    rank = Rank(sharded("dense"))
    rank.prepare()
    rank.sync()
    assert rank.exchange.ready(rank.export, rank.layouts)
    error = None
    with _failing_on_rank_1(rank, piece, packing):
        try:
            for index, arranged in enumerate(rank.own):
                rank.exchange.fill(index, torch.zeros(arranged.nbytes, dtype=torch.uint8))
        except MemoryError as raised:
            error = str(raised)
        rank.exchange.drain()
    rank.exchange.free()
    rank.sync()
    return error, rank.seen.kinds[-1], rank.seen.wrong[-1]


def fail_in_the_proof(piece, packing):
    """Why nothing is exchanged, as each rank has it, and what the next sync does."""
    rank = Rank(sharded("dense"))
    rank.prepare()
    with _failing_on_rank_1(rank, piece, packing):
        rank.sync()
    rank.sync()
    return rank.seen.reason, rank.seen.kinds


def _moved(rank, on, offset=0):
    """Another storage for one rank's shard of one parameter, with the same values.

    Args:
        rank: all of them.
        on: which rank's.
        offset: of the shard in its storage, in elements; another one makes it another parameter.
    """
    parameter = next(p for p in rank.model.parameters() if p.to_local().numel())
    if dist.get_rank() == on:
        local = parameter.to_local().detach()
        moved = local.new_empty(local.numel() + offset)[offset:].view(local.shape)
        parameter._local_tensor = moved.copy_(local)


def move_storages():
    """A shard moves on rank 2 alone: it is sent from where it is."""
    rank = Rank(sharded("dense"))
    assert rank.prepare(), rank.seen.reason
    rank.sync()
    for _ in range(2):
        rank.step()
        _moved(rank, on=2)
        rank.sync()
    return dataclasses.asdict(rank.seen)


def change_parameters():
    """A parameter is of another kind on rank 2 alone, again and again."""
    rank = Rank(sharded("dense"))
    for offset in range(1, 7):
        if not rank.prepare():
            break
        rank.sync()
        rank.sync()
        _moved(rank, on=2, offset=offset)
        rank.sync()
    return dataclasses.asdict(rank.seen)


def trace_anew():
    """Other parameters, traced by somebody else before the exchange has looked at them."""
    rank = Rank(sharded("dense"))
    assert rank.prepare(), rank.seen.reason
    rank.sync()
    _moved(rank, on=2, offset=1)
    assert rank.source_map.trace(rank.export) is None
    rank.sync()
    return rank.seen.kinds


def recheck():
    """Every second sync is compared again."""
    rank = Rank(sharded("tied"), recheck=2)
    rank.prepare()
    for _ in range(5):
        rank.sync()
    return dataclasses.asdict(rank.seen)


def _each(change):
    return lambda weights: ((name, change(tensor)) for name, tensor in weights)


def _reduced(tensor):
    dist.all_reduce(tensor)
    return tensor


def _swapped_on_rank_1(weights):
    for name, tensor in weights:
        swaps = {"gate_proj": "up_proj", "up_proj": "gate_proj"} if dist.get_rank() == 1 else {}
        for old, new in swaps.items():
            if f".{old}." in name:
                name = name.replace(old, new)
                break
        yield name, tensor


def _broken_on_rank_3(weights):
    for i, pair in enumerate(weights):
        if i == 4 and dist.get_rank() == 3:
            raise RuntimeError("the export of rank 3 broke")
        yield pair


EXPORTS = {
    "casts": _each(lambda tensor: tensor.to(torch.float16)),
    "adds": _each(lambda tensor: tensor + 1),
    "adds in place": _each(lambda tensor: tensor.add_(1)),
    "reverses rows": _each(lambda tensor: tensor.flip(0)),
    "reads values": _each(lambda tensor: tensor[: int(tensor.sum())]),
    "communicates": _each(_reduced),
    "brings its own": lambda weights: [("extra", torch.ones(2)), *weights],
    "repeats a shape": _each(lambda tensor: torch.empty_like(tensor)),
    "breaks on rank 3": _broken_on_rank_3,
}


def refused_exports():
    """Each export that cannot be traced: the reason on this rank, and that nothing was spoiled."""
    model, reasons = sharded("moe"), {}
    for name, change in EXPORTS.items():
        rank = Rank(model, change)
        rank.prepare()
        reasons[name] = rank.seen.reason, rank.sync()
    rank = Rank(model, _swapped_on_rank_1)
    rank.layouts = rank.layouts[:1]
    rank.prepare()
    reasons["differs on rank 1"] = rank.seen.reason, rank.sync()
    return reasons


def unsupported_parameters():
    """Parameters whose bytes are not in rows on one line of ranks; by what is wrong with them."""
    from torch.distributed.tensor import Shard

    from verl_sglang_sync.sources.export_trace import NotTraceable, trace_export

    world_size = dist.get_world_size()
    line = init_device_mesh("cpu", (world_size,))
    square = init_device_mesh("cpu", (2, world_size // 2))
    weight = torch.arange(48.0).view(8, 6)
    cases = {
        "columns": distribute_tensor(weight, line, [Shard(1)]),
        "two dimensions": distribute_tensor(weight, square, [Replicate(), Shard(0)]),
        "transposed": distribute_tensor(weight, line, [Replicate()]).t(),
        "replicated": distribute_tensor(weight, line, [Replicate()]),
        "plain": weight,
        "on another device": weight.to("meta"),
    }
    reasons = {}
    for name, tensor in cases.items():
        state = {"w": tensor}

        def export(state=state):
            for key, value in state.items():
                yield key, value.full_tensor() if isinstance(value, DTensor) else value

        try:
            trace_export(
                export(), sources=lambda state=state: state, world_size=world_size, device=CPU
            )
            reasons[name] = None
        except NotTraceable as reason:
            reasons[name] = str(reason)
    return reasons


def views_and_copies():
    """Slices, transposes and copies of copies: each is found, or refused."""
    from verl_sglang_sync.sources.export_trace import NotTraceable, trace_export

    world_size = dist.get_world_size()
    full = torch.arange(6 * 4 * 8, dtype=torch.float32).view(6, 4, 8)
    weight = distribute_tensor(full, init_device_mesh("cpu", (world_size,)))
    steps = {
        "slice": lambda t: t[1:5, 2],
        "chunk": lambda t: t.chunk(2, dim=1)[1],
        "copied chunk": lambda t: t.chunk(2, dim=2)[1].contiguous(),
        "transposed": lambda t: t.transpose(0, 2),
        "transposed copy": lambda t: t.transpose(0, 2).contiguous(),
        "kept order": lambda t: t.transpose(0, 2).clone(),
        "view of a copy": lambda t: t[:, 1:3].contiguous()[2],
        "flat view of a copy": lambda t: t[:, :, :4].contiguous().view(-1)[16:80],
        "ragged view of a copy": lambda t: t[:, :, :4].contiguous().view(-1)[3:17],
        "other dtype": lambda t: t[1].view(torch.int32),
        "expanded": lambda t: t[:, :1, :1].expand(6, 2, 8),
        "same device": lambda t: t.to("cpu", copy=True)[3],
    }
    found = {}
    for name, step in steps.items():
        try:
            traced = trace_export(
                ((n, step(w.full_tensor())) for n, w in [("w", weight)]),
                sources=lambda: {"w": weight},
                world_size=world_size,
                device=CPU,
            )
        except NotTraceable as reason:
            found[name] = str(reason)
            continue
        source = traced.tensors["w"].origin.bytes
        expected = step(full).contiguous()
        flat = full.view(torch.uint8).view(-1)
        picked = flat.as_strided(
            [count for count, _ in source.dims],
            [stride for _, stride in source.dims],
            source.offset,
        )
        same = torch.equal(picked.reshape(-1), expected.view(torch.uint8).view(-1))
        found[name] = "found" if same else "wrong"
    return found


def a_backend_that_cannot():
    """No all-to-all: what the proof says, and what is done then."""
    rank = Rank(sharded("tied"))
    prepared = rank.prepare()
    refusal = RuntimeError("this backend has no all-to-all")
    with mock.patch.object(dist, "all_to_all_single", side_effect=refusal):
        rank.sync()
    rank.sync()
    return prepared, rank.seen.kinds, rank.exchange.off


def wrong_origins():
    """The traced origins are spoiled: the comparison must see it; returns what it says."""
    from verl_sglang_sync.sources import source_map

    rank = Rank(sharded("moe"))
    trace = source_map.trace_export

    def spoiled(*args, **kwargs):
        traced = trace(*args, **kwargs)
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        other = traced.tensors[name.replace("up_proj", "gate_proj")]
        return dataclasses.replace(traced, tensors={**traced.tensors, name: other})

    with mock.patch.object(source_map, "trace_export", spoiled):
        prepared = rank.prepare()
    rank.sync()
    rank.sync()
    return prepared, rank.seen.kinds, rank.seen.reason, rank.exchange.off
