"""Models of 235 B to 1 T parameters, as Megatron cuts them and as SGLang's ranks read them.

Shapes alone, by the two projects' rules as Megatron-Bridge's export is traced where it runs
(`tests/e2e/test_megatron_weights.py`): no weight is allocated.

    for weight in weights_of(MODELS["kimi-k2"]):
        weight.parameter, weight.region(trainer)     # which bytes of which Megatron parameter
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_loader.common.regions.geometry import Region

ITEMSIZE = 2


@dataclass(frozen=True, kw_only=True)
class Model:
    """A mixture of experts; sizes as in its Hugging Face config.

    Attributes:
        dense_layers: the first ones have no experts, but `dense_inter`.
        shared_inter: of the shared expert; 0: there is none.
        q_lora: of multi-head latent attention; 0: grouped-query attention.
    """

    layers: int
    hidden: int
    vocab: int
    heads: int
    experts: int
    inter: int
    kv_heads: int = 0
    head_dim: int = 128
    dense_layers: int = 0
    dense_inter: int = 0
    shared_inter: int = 0
    q_lora: int = 0
    kv_lora: int = 512
    rope_dim: int = 64


_MLA = {"hidden": 7168, "dense_inter": 18432, "inter": 2048, "shared_inter": 2048, "q_lora": 1536}
MODELS = {
    "qwen3-235b-a22b": Model(
        layers=94, hidden=4096, vocab=151936, heads=64, kv_heads=4, experts=128, inter=1536
    ),
    "deepseek-v3": Model(layers=61, dense_layers=3, vocab=129280, heads=128, experts=256, **_MLA),
    "kimi-k2": Model(layers=61, dense_layers=1, vocab=163840, heads=64, experts=384, **_MLA),
}


@dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint, `rows` by `columns`, and its place in a Megatron parameter.

    Attributes:
        name: in the checkpoint.
        layer: whose; -1 for what stands before the first, `layers` for what stands after the last.
        parameter: Megatron's name; an expert's parameter has no number.
        cut: which dimension both sides cut across tensor parallel ranks: "rows", "columns", or ""
            for none.
        expert: number; None: it belongs to none.
        pitch: rows of the parameter, all ranks together, of which this tensor's are a part; 0: all.
        offset: rows of a group before this tensor's.
        groups: into which a parameter's rows are divided, all ranks together; 0: one a rank.
    """

    name: str
    layer: int
    parameter: str
    rows: int
    columns: int
    cut: str
    expert: int | None = None
    pitch: int = 0
    offset: int = 0
    groups: int = 0

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self.rows * self.columns * ITEMSIZE

    @property
    def parameter_nbytes(self) -> int:
        """Of the parameter, all ranks together."""
        return (self.pitch or self.rows) * self.columns * ITEMSIZE

    def region(self, num_shards: int, shard: int = 0) -> Region:
        """Where its elements lie in the parameter's shards, put behind each other.

        Args:
            num_shards: across tensor parallel ranks.
            shard: the first one's number; of an expert, its place among those of the other ranks.
        """
        columns, all_rows = self.columns, self.pitch or self.rows
        if self.cut == "columns" and num_shards > 1:
            part = columns // num_shards
            shape, strides = (self.rows, num_shards, part), (part, self.rows * part, 1)
            return Region(0, shape, strides, ITEMSIZE)
        groups = self.groups or num_shards
        pitch, rows = all_rows // groups, self.rows // groups
        start = shard * all_rows * columns
        offset = self.offset if self.groups else self.offset // num_shards
        return Region(
            (start + offset * columns) * ITEMSIZE,
            (groups, rows, columns),
            (pitch * columns, columns, 1),
            ITEMSIZE,
        )


def weights_of(model: Model) -> Iterator[Weight]:
    """All tensors in the order of the layers."""
    hidden, vocab = model.hidden, model.vocab
    yield Weight("model.embed_tokens.weight", -1, "embedding", vocab, hidden, "rows")
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        yield Weight(f"{prefix}.input_layernorm.weight", layer, "input_norm", 1, hidden, "")
        yield from _latent(model, layer) if model.q_lora else _grouped(model, layer)
        heads = model.heads * model.head_dim
        name = f"{prefix}.self_attn.o_proj.weight"
        yield Weight(name, layer, "linear_proj", hidden, heads, "columns")
        yield Weight(f"{prefix}.post_attention_layernorm.weight", layer, "mlp_norm", 1, hidden, "")
        if layer < model.dense_layers:
            yield from _gated(f"{prefix}.mlp", layer, "mlp", hidden, model.dense_inter)
            continue
        yield Weight(f"{prefix}.mlp.gate.weight", layer, "router", model.experts, hidden, "")
        if model.shared_inter:
            name = f"{prefix}.mlp.shared_experts"
            yield from _gated(name, layer, "shared", hidden, model.shared_inter)
        for expert in range(model.experts):
            name = f"{prefix}.mlp.experts.{expert}"
            yield from _gated(name, layer, "experts", hidden, model.inter, expert)
    yield Weight("model.norm.weight", model.layers, "final_norm", 1, hidden, "")
    yield Weight("lm_head.weight", model.layers, "output", vocab, hidden, "rows")


def _grouped(model: Model, layer: int) -> Iterator[Weight]:
    """q, k and v of one parameter, interleaved by groups of heads."""
    dim, groups = model.head_dim, model.kv_heads
    q = model.heads // groups * dim
    for name, rows, offset in (("q", q, 0), ("k", dim, q), ("v", dim, q + dim)):
        yield Weight(
            f"model.layers.{layer}.self_attn.{name}_proj.weight",
            layer,
            "linear_qkv",
            groups * rows,
            model.hidden,
            "rows",
            pitch=groups * (q + 2 * dim),
            offset=offset,
            groups=groups,
        )
    for name in ("q", "k"):
        full = f"model.layers.{layer}.self_attn.{name}_norm.weight"
        yield Weight(full, layer, f"{name}_norm", 1, dim, "")


def _latent(model: Model, layer: int) -> Iterator[Weight]:
    """Multi-head latent attention; the projections down are whole on every rank."""
    prefix, heads, dim = f"model.layers.{layer}.self_attn", model.heads, model.head_dim
    for name, rows, columns, cut in (
        ("q_a_proj", model.q_lora, model.hidden, ""),
        ("q_a_layernorm", 1, model.q_lora, ""),
        ("q_b_proj", heads * (dim + model.rope_dim), model.q_lora, "rows"),
        ("kv_a_proj_with_mqa", model.kv_lora + model.rope_dim, model.hidden, ""),
        ("kv_a_layernorm", 1, model.kv_lora, ""),
        ("kv_b_proj", heads * 2 * dim, model.kv_lora, "rows"),
    ):
        yield Weight(f"{prefix}.{name}.weight", layer, name, rows, columns, cut)


def _gated(
    prefix: str, layer: int, parameter: str, hidden: int, inter: int, expert: int | None = None
) -> Iterator[Weight]:
    """gate and up of one parameter, behind each other on every rank, and down."""
    for name, offset in (("gate", 0), ("up", inter)):
        yield Weight(
            f"{prefix}.{name}_proj.weight",
            layer,
            f"{parameter}.fc1",
            inter,
            hidden,
            "rows",
            expert,
            pitch=2 * inter,
            offset=offset,
        )
    name = f"{prefix}.down_proj.weight"
    yield Weight(name, layer, f"{parameter}.fc2", hidden, inter, "columns", expert)
