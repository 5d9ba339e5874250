"""Speculative decoding around syncs: how much of its drafts a server accepts, on any device.

The models are tiny Llamas whose drafts the target accepts, though their weights are random.

What the layers of such a model write is zero, and its output layer is the embedding in another
order, so that its next token is a function of the last one alone, and never a close choice,
whatever kernels compute it. A draft knows the function:

- `STANDALONE`: the draft is another copy of the target.
- `EAGLE`: the draft has the target's embedding and output layer, which SGLang has them share, and
  passes the embedding on.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_assets import byte_tokenizer

from support.exports import weights_of
from support.http_requests import greedy, post
from support.served import Served, served
from support.trainer import Hashes, TrainerRank, hashes_of_models, report_of_cycle

TARGET, OTHER, DRAFT = "model", "other", "draft"
NUM_STEPS = 3
"""Tokens that are drafted before each verification; one more is the target's own."""

ACCEPTED = NUM_STEPS + 0.5
REFUSED = 1.3
PROMPTS = ("The draft", "is accepted")

Syncs = Sequence[tuple[str, str]]
"""`draft_weights` of each, and the folder of the weights that are sent."""

FROZEN: Syncs = [("frozen", name) for name in (TARGET, TARGET, OTHER, TARGET)]
SYNCED: Syncs = [("synced", OTHER), ("synced", OTHER), ("frozen", TARGET), ("synced", TARGET)]
SYNCS: dict[str, Syncs] = {"STANDALONE": [*FROZEN, *SYNCED], "EAGLE": FROZEN}
"""Only a trainer that has the draft can sync it: EAGLE's has layers of its own."""

SHARED = ("embed_tokens", "lm_head")  # by EAGLE's draft and its target


_LLAMA: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def make_models(algorithm: str, folder: Path) -> tuple[str, ...]:
    """Write target, draft, and weights of another target that the draft does not fit.

    Args:
        algorithm: "STANDALONE" or "EAGLE".
        folder: gets the folders `TARGET`, `OTHER` and, for EAGLE, `DRAFT`.

    Returns:
        SGLang's arguments.
    """
    is_eagle = algorithm == "EAGLE"
    _make_llama(folder / TARGET, seed=0)
    # A draft that passes the embedding on fits each target that does so.
    _make_llama(folder / OTHER, seed=1, layers_write=is_eagle)
    if is_eagle:
        _make_eagle_draft(folder / DRAFT)
    return (
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(folder / (DRAFT if is_eagle else TARGET))),
        *("--speculative-num-steps", str(NUM_STEPS), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(NUM_STEPS + 1)),
    )


def _make_llama(folder: Path, *, seed: int, layers: int = 2, layers_write: bool = False) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**_LLAMA, num_hidden_layers=layers))
    for name, parameter in model.named_parameters():
        if not layers_write and name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)
    if not layers_write:
        following = torch.randperm(_LLAMA["vocab_size"])
        model.lm_head.weight.data[following] = model.model.embed_tokens.weight.data
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def _make_eagle_draft(folder: Path) -> None:
    """One layer, after an `fc` that leaves out the target's hidden state."""
    _make_llama(folder, seed=2, layers=1)
    config = json.loads((folder / "config.json").read_text())
    eagle = {"architectures": ["LlamaForCausalLMEagle"]}
    (folder / "config.json").write_text(json.dumps(config | eagle))
    hidden = _LLAMA["hidden_size"]
    named = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name not in ("lm_head.weight", "model.norm.weight") and "input_layernorm" not in name
    }
    named["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    named["fc.bias"] = torch.zeros(hidden)
    save_file(named, folder / "model.safetensors", {"format": "pt"})


def check_accept_lengths(
    algorithm: str,
    folder: Path,
    *,
    num_tokens: int,
    extra: tuple[str, ...] = (),
    ranks_on: Mapping[str, Any] | None = None,
    **server: Any,
) -> None:
    """Serve a model with its draft, and sync both; prints the accept lengths.

    A draft that was not changed keeps its length, and so does one that got what its target got; one
    that was left behind, or alone was overwritten, is refused from then on: that is the control.
    STANDALONE's weights are not looked at: SGLang 0.5.14 dies of every update there but a session
    (`StandaloneWorkerV2` has no `tp_rank`).

    Args:
        algorithm: one of `SYNCS`.
        folder: for the models.
        num_tokens: that are generated for each of `PROMPTS` after each sync.
        extra: more of SGLang's arguments.
        ranks_on: arguments of the trainer's `Ranks`.
        server: of the `served` model.
    """
    extra, syncs = (*make_models(algorithm, folder), *extra), SYNCS[algorithm]
    with (
        served(folder, extra=extra, **server) as engine,
        engine.ranks(**ranks_on or {}) as ranks,
    ):
        hashes, reports = [_hashes_of_models(engine, algorithm)], []
        lengths = [_accept_length(engine.url, num_tokens)]
        for draft_weights, name in syncs:
            reports.append(ranks.run(_sync, draft_weights, name)[0])
            hashes.append(_hashes_of_models(engine, algorithm))
            lengths.append(_accept_length(engine.url, num_tokens))
        assert engine.lives
    row = [f"{how} {sent}" for how, sent in [("as", "loaded"), *syncs]]
    print(f"accept length, {algorithm}:", *zip(row, lengths, strict=True))
    assert lengths[0] > ACCEPTED
    fits = TARGET  # the weights that the draft fits
    for (how, sent), length in zip(syncs, lengths[1:], strict=True):
        fits = fits if how == "frozen" else sent
        assert length > ACCEPTED if fits == sent else length < REFUSED
        if fits == sent == TARGET:
            assert length == lengths[0]
    second = reports[1]
    assert second["num_replayed"] == second["num_buckets"] > 0, second["eager_reason"]
    if server.get("device") == "cuda":
        kept = [sum(r["stages"]["release"]["weights"]["host_bytes"]) for r in reports]
        assert 0 < kept[2] < kept[0], "all at first, then the draft, but not what syncs rewrite"
    if algorithm == "EAGLE":
        targets = [target for _, target in hashes]
        assert targets[0] == targets[1] == targets[2] == targets[4] != targets[3]
        own = [{n: h for n, h in d.items() if not any(s in n for s in SHARED)} for d, _ in hashes]
        assert own == own[:1] * 5 and "model.fc.weight" in own[0]


def _sync(rank: TrainerRank, draft_weights: str, name: str) -> dict[str, Any]:
    if rank.kept.get("draft_weights") != draft_weights:
        rank.kept["draft_weights"] = draft_weights
        rank.kept["manager"] = rank.manager("compiled", draft_weights=draft_weights)
    weights = weights_of(rank.folder / name, rank.device)
    return report_of_cycle(rank.kept["manager"], weights, name)


def _hashes_of_models(engine: Served, algorithm: str) -> Hashes:
    """Of EAGLE's draft, and of its target."""
    if algorithm != "EAGLE":
        return []
    engine.hashes()
    return hashes_of_models(engine.log_file.parent)


def _accept_length(url: str, num_tokens: int) -> float:
    """Tokens for each verification, one of them the target's own."""
    status, text = post(url, "generate", greedy(num_tokens) | {"text": PROMPTS})
    assert status == 200, text
    infos = [answer["meta_info"] for answer in json.loads(text)]
    tokens = sum(info["completion_tokens"] for info in infos)
    return float(tokens / sum(info["spec_verify_ct"] for info in infos))
