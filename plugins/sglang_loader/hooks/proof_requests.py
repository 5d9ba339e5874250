"""Proofs that a user requests from a server, and their outcomes, in the process that serves HTTP.

    POST /weight_sync/prove    requests a proof of the next sync that begins
    GET  /weight_sync/proof    returns the outcome of the last proof

The user's request travels with the update request to the schedulers, and in their Hello to the
trainer. The trainer proves that sync before any request runs. The session that proves the sync
returns the outcome in the reply to its update request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_loader.common.session.messages import Proof
from sglang_loader.upstream import admin_endpoint, facts_of

PROVE_PATH, PROOF_PATH = "/weight_sync/prove", "/weight_sync/proof"


def proof_fact(proof: Proof, differing: Sequence[str], *, is_good: bool) -> dict[str, Any] | None:
    """Return the outcome of a session's proof, for the reply, or None if nothing was compared.

    Args:
        differing: tensors that the engine held with other bytes, on any TP rank.
        is_good: the session was published.
    """
    if proof == "none" or not (differing or is_good):
        return None
    return {"proof": proof, "differing": list(differing)}


@dataclass
class Proofs:
    """The proofs of one server's engine.

    Attributes:
        number: number of the last proof, from 1, or 0 before any proof.
        weight_version: of the sync that the proof was made in.
        is_proven: the engine serves what the trainer held, bit for bit. None before any proof.
        differing: names of the tensors that the engine held with other bytes.
        seconds: time that the proof took.
        num_requests: the requests for a proof that users have made.
        num_answered: those of them that a proof has answered.
    """

    number: int = 0
    weight_version: str | None = None
    is_proven: bool | None = None
    differing: list[str] = field(default_factory=list)
    seconds: float | None = None
    num_requests: int = 0
    num_answered: int = 0

    @property
    def requested(self) -> bool:
        """True if a user waits for a proof."""
        return self.num_requests > self.num_answered

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a reply to a user."""
        numbers = ("num_requests", "num_answered")
        shown = {name: value for name, value in asdict(self).items() if name not in numbers}
        return {**shown, "requested": self.requested}

    def note(
        self, replies: Sequence[Any], version: str | None, seconds: float, num_requests: int
    ) -> None:
        """Record the outcome of a proof if the engine's replies have one.

        Args:
            num_requests: `num_requests` when the engine was asked. A proof answers no later one.
        """
        facts = [fact for reply in replies if (fact := facts_of(reply).get("proof")) is not None]
        if not facts:
            return
        names = dict.fromkeys(name for fact in facts for name in fact["differing"])
        self.number += 1
        self.weight_version, self.seconds = version, seconds
        self.differing, self.is_proven = list(names), not names
        # If the proof refused a route, the engine serves none of its weights. The trainer makes the
        # export, and the requested proof is still to come.
        if not names or facts[0]["proof"] == "served":
            self.num_answered = num_requests


proofs = Proofs()
"""The proofs of this process. The process serves one engine."""


async def prove() -> dict[str, Any]:
    """Request a proof of the next sync that begins. Several requests lead to one proof."""
    proofs.num_requests += 1
    return proofs.fields


async def last_proof() -> dict[str, Any]:
    """Return the outcome of the last proof."""
    return proofs.fields


def add_endpoints(app: Any) -> None:
    """Add both endpoints to SGLang's app. `PROVE_PATH` needs the same API key as an update."""
    if not any(getattr(route, "path", None) == PROVE_PATH for route in app.routes):
        app.add_api_route(PROVE_PATH, admin_endpoint(prove), methods=["POST"])
        app.add_api_route(PROOF_PATH, last_proof, methods=["GET"])
