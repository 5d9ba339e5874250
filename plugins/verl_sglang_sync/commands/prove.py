"""`verl-sglang-sync prove`: compares a server's weights with the trainer's, bit for bit.

The command requests a proof from a rollout server. The trainer then proves its next sync with all
engines. The server keeps the outcome (`sglang_loader.hooks.proof_requests`), for which the command
waits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sglang_loader.common.naming import listed
from verl_sglang_sync.engine.server_client import operations
from verl_sglang_sync.engine.server_client.client import SGLangServerClient
from verl_sglang_sync.engine.server_client.errors import ReplyLost, ServerError
from verl_sglang_sync.http_settings import checked_base_url

POLL_S = 1.0
REPLY_TIMEOUT_S = 30.0


class Status(IntEnum):
    """Exit statuses of the command."""

    PROVEN = 0
    DIFFERS = 1
    NO_ANSWER = 2


@dataclass(frozen=True)
class Answer:
    """The outcome of the command for one server.

    Attributes:
        text: the outcome for people, one line.
        proof: the server's last proof. Empty if the server did not answer.
    """

    status: Status
    text: str
    proof: Mapping[str, Any]


def prove(url: str, *, api_key: str | None, admin_api_key: str | None, timeout_s: float) -> Answer:
    """Request a proof from a server, and wait for the outcome.

    Args:
        timeout_s: longest wait for a sync.

    Raises:
        ValueError: `url` is no URL of a server.
    """
    url = checked_base_url("URL", url)
    client = SGLangServerClient(
        url, timeout_s=REPLY_TIMEOUT_S, api_key=api_key, admin_api_key=admin_api_key
    )
    deadline = time.monotonic() + timeout_s
    proof: dict[str, Any] = {}
    try:
        proof = client.run(operations.ask_for_proof())
        # The server counts proofs. A new number without an open request is the answer.
        first = proof["number"]
        while proof["number"] == first or proof["requested"]:
            if time.monotonic() > deadline:
                return Answer(Status.NO_ANSWER, _no_sync(url, timeout_s), proof)
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
            try:
                proof = client.run(operations.last_proof())
            except ReplyLost:  # a server may be slow while it is updated
                continue
    except ServerError as error:
        return Answer(Status.NO_ANSWER, _no_answer(error), proof)
    version = f"{url} at weight version {proof['weight_version']}"
    if proof["is_proven"]:
        text = (
            f"proven: {version} serves the trainer's weights bit for bit. The digests of all its "
            f"tensors are those of the full export ({proof['seconds']:.3g} s)"
        )
        return Answer(Status.PROVEN, text, proof)
    names = proof["differing"]
    text = (
        f"DIFFERS: {version} did not serve the trainer's weights: {len(names)} tensors had other "
        f"bytes than the full export: {listed(names)}. The server serves the export's weights now, "
        "and every later sync makes the full export, which is slower. Please report this fault, "
        "with the trainer's log"
    )
    return Answer(Status.DIFFERS, text, proof)


def _no_sync(url: str, timeout_s: float) -> str:
    return (
        f"no answer: {url} was asked, and no sync was proven within {timeout_s:g} s. The trainer "
        "proves its next sync. Either no sync has begun (a long step, or the training has ended), "
        "or the sync has failed, or the rollout serves a LoRA adapter, or the export cannot be "
        "made twice (see the trainer's log). The request stays: run the command again, or wait "
        "longer with --timeout-s"
    )


def _no_answer(error: ServerError) -> str:
    if error.status == 404:
        return f"no answer: the server was not launched with the loaders of +weight_sync: {error}"
    if error.status in (401, 403):
        return f"no answer: give the server's key with --api-key or --admin-api-key: {error}"
    return f"no answer: {error}"
