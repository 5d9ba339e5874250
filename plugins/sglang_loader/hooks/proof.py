"""Proofs that a user asks a server for, and their outcomes, in the process that serves HTTP.

    POST /weight_sync/prove    asks for a proof of the next sync that begins
    GET  /weight_sync/proof    the outcome of the last proof

The wish goes with the update request to the schedulers, whose Hello tells the trainer. The trainer
proves that sync before any request runs. The outcome comes back in the reply to the update request
of the session that has proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_loader.common.session.messages import Proof
from sglang_loader.upstream import admin_endpoint, facts_of

PROVE_PATH, PROOF_PATH = "/weight_sync/prove", "/weight_sync/proof"


def proof_fact(proof: Proof, differing: Sequence[str], *, is_good: bool) -> dict[str, Any] | None:
    """Return the outcome of a session's proof, for the reply; None if nothing was compared.

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
        number: of the last proof, from 1; 0: there was none.
        weight_version: of the sync that it was made in.
        is_proven: the engine serves what the trainer held, bit for bit; None before any proof.
        differing: names of the tensors that the engine held with other bytes.
        seconds: time that the proof took.
        requested: a user waits for a proof.
    """

    number: int = 0
    weight_version: str | None = None
    is_proven: bool | None = None
    differing: list[str] = field(default_factory=list)
    seconds: float | None = None
    requested: bool = False

    def note(self, replies: Sequence[Any], version: str | None, seconds: float) -> None:
        """Record the outcome if the engine's replies have that of a proof."""
        facts = [fact for reply in replies if (fact := facts_of(reply).get("proof")) is not None]
        if not facts:
            return
        names = dict.fromkeys(name for fact in facts for name in fact["differing"])
        self.number += 1
        self.weight_version, self.seconds = version, seconds
        self.differing, self.is_proven = list(names), not names
        # A way that is refused has brought no weights that are served. The trainer exports them,
        # and a proof that was asked for is still to be made.
        if not names or facts[0]["proof"] == "served":
            self.requested = False


proofs = Proofs()
"""The proofs of this process, which serves one engine."""


async def prove() -> dict[str, Any]:
    """POST: ask for a proof of the next sync that begins; any number of times, for one proof."""
    proofs.requested = True
    return asdict(proofs)


async def last_proof() -> dict[str, Any]:
    """GET: the outcome of the last proof."""
    return asdict(proofs)


def add_endpoints(app: Any) -> None:
    """Add both endpoints to SGLang's app. The keys that an update needs are needed to ask."""
    if not any(getattr(route, "path", None) == PROVE_PATH for route in app.routes):
        app.add_api_route(PROVE_PATH, admin_endpoint(prove), methods=["POST"])
        app.add_api_route(PROOF_PATH, last_proof, methods=["GET"])
