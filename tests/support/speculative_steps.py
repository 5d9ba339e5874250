"""How much of its drafts a server accepts, around syncs, and what must hold of it on any device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from support.engine_loaders import MODELS_LOADER
from support.engine_steps import report_of_cycle
from support.exports import weights_of
from support.http_requests import greedy, post
from support.served import served
from support.speculative_models import NUM_STEPS, OTHER, TARGET, make_models
from support.trainer import Hashes, TrainerRank, ask_engine

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


def check_accept_lengths(algorithm: str, folder: Path, *, num_tokens: int, **server: Any) -> None:
    """Serve a model with its draft, and sync both; prints the accept lengths.

    A draft that was not changed keeps its length, and so does one that got what its target got; one
    that was left behind, or alone was overwritten, is refused from then on: that is the control.
    STANDALONE's weights are not looked at: SGLang 0.5.14 dies of every update there but a session
    (`StandaloneWorkerV2` has no `tp_rank`).
    """
    options, syncs = make_models(algorithm, folder), SYNCS[algorithm]
    extra = (*options, *server.pop("extra", ()))
    step = server.pop("step_options", {})
    with served(folder, extra=extra, loaders=(MODELS_LOADER,), **server) as engine:
        [seen] = engine.run(drafts_around_syncs, algorithm, num_tokens, **step)
        assert engine.lives
    lengths = [row["accept_length"] for row in seen]
    row = [f"{how} {sent}" for how, sent in [("as", "loaded"), *syncs]]
    print(f"accept length, {algorithm}:", *zip(row, lengths, strict=True))
    assert lengths[0] > ACCEPTED
    fits = TARGET  # the weights that the draft fits
    for (how, sent), length in zip(syncs, lengths[1:], strict=True):
        fits = fits if how == "frozen" else sent
        assert length > ACCEPTED if fits == sent else length < REFUSED
        if fits == sent == TARGET:
            assert length == lengths[0]
    second = seen[2]["report"]
    assert second["num_replayed"] == second["num_buckets"] > 0, second["eager_reason"]
    if algorithm == "EAGLE":
        targets = [row["hashes"][1] for row in seen]
        assert targets[0] == targets[1] == targets[2] == targets[4] != targets[3]
        assert [own_of(row["hashes"][0]) for row in seen] == [own_of(seen[0]["hashes"][0])] * 5


def own_of(draft: dict[str, str]) -> dict[str, str]:
    """Hashes of an EAGLE draft's own tensors."""
    own = {name: each for name, each in draft.items() if not any(s in name for s in SHARED)}
    assert "model.fc.weight" in own
    return own


def drafts_around_syncs(rank: TrainerRank, algorithm: str, num_tokens: int) -> list[dict[str, Any]]:
    """What holds before all syncs, and after each.

    Returns:
        "accept_length", "hashes" of EAGLE's draft and target, "report" of the sync.
    """

    def look(report: dict[str, Any]) -> dict[str, Any]:
        hashes = _hashes_of_models(rank) if algorithm == "EAGLE" else []
        length = _accept_length(rank.url, num_tokens)
        return {"accept_length": length, "hashes": hashes, "report": report}

    seen = [look({})]
    for draft_weights, alike in groupby(SYNCS[algorithm], lambda sync: sync[0]):
        manager = rank.manager("compiled", draft_weights=draft_weights)
        for _, name in alike:
            weights = weights_of(rank.folder / name, rank.device)
            seen.append(look(report_of_cycle(manager, weights, name)))
    return seen


def _hashes_of_models(rank: TrainerRank) -> Hashes:
    """Of the draft, and of the target."""
    path = rank.folder / "models.jsonl"
    path.unlink(missing_ok=True)
    ask_engine(rank, MODELS_LOADER, str(path))
    return [json.loads(line) for line in path.read_text().splitlines()]


def _accept_length(url: str, num_tokens: int) -> float:
    """Tokens for each verification, one of them the target's own."""
    status, text = post(url, "generate", greedy(num_tokens) | {"text": PROMPTS})
    assert status == 200, text
    infos = [answer["meta_info"] for answer in json.loads(text)]
    tokens = sum(info["completion_tokens"] for info in infos)
    return float(tokens / sum(info["spec_verify_ct"] for info in infos))
