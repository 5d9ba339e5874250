"""Proof that a sync brings the same bytes that the engine holds already.

Two syncs of the same weights must leave the same bytes. In the proof "route" the trainer sends the
weights of an exported sync once more, by the route that it wants to use from then on. Each engine
rank does this:

1. `HeldWeights.of(loaders)` takes a digest of every storage that the models reach.
2. `poison` fills every byte that the load plans write with a pattern.
3. The whole sync runs, over the same memory and process groups as later syncs.
4. `differing` takes the digests again, and names the tensors of storages that changed.

If a byte comes from a wrong place, or does not come, the digests differ. One fault stays unseen: a
swap of tensors that hold the same bytes in this sync, such as norms that are all ones. `has_alike`
finds such tensors. The trainer repeats the proof when they may have become different. In the proof
"served" the weights come by the export instead, and nothing is poisoned. Digests are taken on the
device, and read each storage once.

A `SessionProof` takes these steps in a session, and draws the consequences for the load plans. A
load plan loads exports, too. If the proof fails, the plan may be at fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_loader.common.naming import listed
from sglang_loader.common.session.messages import LaterProof, Proof
from sglang_loader.load_plan.plan import LoadPlan
from sglang_loader.load_plan.verify import POISON
from sglang_loader.session.kept_plan import HeldBytes
from sglang_loader.session.model_loader import ModelLoader


class Differs(RuntimeError):
    """A failed proof: the sync has left other bytes than the engine held, in the named tensors."""


class SavedPlanDiffers(Differs):
    """A failed proof of a load plan that an earlier process has saved."""


@dataclass(frozen=True)
class HeldWeights:
    """The digests of what the models of one engine rank held when a sync began.

    Attributes:
        loaders: of the models.
        held: by model.
    """

    loaders: Sequence[ModelLoader]
    held: Sequence[HeldBytes]

    @classmethod
    def of(cls, loaders: Sequence[ModelLoader]) -> HeldWeights:
        """Take the digests of the models' present bytes."""
        return cls(loaders, [HeldBytes.of(loader.model) for loader in loaders])

    def poison(self) -> None:
        """Fill every byte that a sync by the load plans overwrites without reading the byte first.

        Raises:
            RuntimeError: a model has no load plan, so that no route can be proven.
        """
        for loader in self.loaders:
            if (plan := loader.plan) is None:
                raise RuntimeError("the engine dropped its load plan before the proof")
            storages = zip(plan.destinations.storages, plan.destinations.memory, strict=True)
            for storage, memory in storages:
                # The right bytes are there already. Without the pattern a copy that does not come
                # would leave them, and the digests would agree.
                for start, stop in plan.coverage.get(storage.name, ()):
                    memory[start:stop].fill_(POISON)

    @property
    def has_alike(self) -> bool:
        """True if storages that load plans write have held the same bytes as others."""
        seen: Counter[tuple[int, ...]] = Counter()
        for loader, held in zip(self.loaders, self.held, strict=True):
            # A route does not write the other storages, so it cannot swap them.
            written = loader.plan.coverage if loader.plan is not None else {}
            pairs = zip(held.destinations.storages, held.digests.tolist(), strict=True)
            seen.update((s.nbytes, *digest) for s, digest in pairs if s.name in written)
        return any(count > 1 for count in seen.values())

    def differing(self) -> list[str]:
        """Return the names of tensors whose storages hold other bytes than before, or moved."""
        pairs = zip(self.loaders, self.held, strict=True)
        return [name for loader, held in pairs for name in held.differing(loader.model)]


class SessionProof:
    """The proof of one session on one engine rank.

    Args:
        kind: "route" or "served". See the module.
        loaders: of the session's models.
        sync: the sync, see `SessionDescriptor`.

    Attributes:
        differing: tensors that were held with other bytes than the session has brought.
        later_proof: the need for another proof, with other weights.
    """

    def __init__(self, kind: Proof, loaders: Sequence[ModelLoader], sync: str) -> None:
        self.differing: list[str] = []
        self.later_proof: LaterProof = "none"
        self._proves_route = kind == "route"
        self._loaders = loaders
        self._sync = sync
        self._held: HeldWeights | None = None
        self._plans: list[LoadPlan | None] = []  # by loader, when the proof began
        self._trusted_here: list[ModelLoader] = []  # whose saved plans this session has proven

    def begin(self, before_writing: Callable[[], None]) -> None:
        """Take digests of what the engine holds. For the proof of a route, poison the weights.

        Args:
            before_writing: called before a byte is overwritten.
        """
        self._held = HeldWeights.of(self._loaders)
        self._plans = [loader.plan for loader in self._loaders]
        if self._proves_route:
            before_writing()
            for loader, held in zip(self._loaders, self._held.held, strict=True):
                if loader.kept.is_unproven:
                    loader.kept.begin_proof(held, self._sync)
            self._held.poison()

    def end(self) -> None:
        """Compare what the engine holds with what it held, when everything is loaded.

        Raises:
            Differs: the bytes differ, and this session proves a route.
            RuntimeError: a load plan was dropped in the proof of a route.
        """
        assert self._held is not None, "the proof has begun"
        # `load_weights` has then loaded the shards: their bytes show nothing of the copy table.
        pairs = zip(self._loaders, self._plans, strict=True)
        if self._proves_route and any(loader.plan is not plan for loader, plan in pairs):
            raise RuntimeError("the engine dropped its load plan in the proof")
        held, self._held = self._held, None
        self.differing = held.differing()
        is_saved = any(loader.kept.is_unproven for loader in self._loaders)
        if not self.differing:
            if self._proves_route:
                self._trust_plans(held.held)
            self.later_proof = "later" if held.has_alike else "none"
            if is_saved or self._awaits_change(held.held):
                self.later_proof = "next_sync"
            return
        text = f"{len(self.differing)} tensors with wrong bytes"
        culprits = f"left by the route or by the load plan: {listed(self.differing)}"
        if not self._proves_route:
            for loader in self._loaders:
                loader.kept.distrust(f"a proof found {text}, {culprits}")
            return
        # The export that follows must not be loaded by a plan that may be at fault.
        for loader in self._loaders:
            loader.kept.doubt(f"the proof of a route found {text}, {culprits}")
        # Nothing of this session may be served.
        raise (SavedPlanDiffers if is_saved else Differs)(
            f"{len(self.differing)} tensors differ from what load_weights made of the full export: "
            f"{listed(self.differing)}"
        )

    def _trust_plans(self, all_held: Sequence[HeldBytes]) -> None:
        for loader, held in zip(self._loaders, all_held, strict=True):
            if loader.kept.is_unproven:
                self._trusted_here.append(loader)
                loader.kept.proven_with = held.digests
            loader.kept.trust()

    def _awaits_change(self, all_held: Sequence[HeldBytes]) -> bool:
        """Return True if a saved plan was not yet proven with other weights than at first.

        What the plan leaves out has the right bytes until the weights change, as they do not in a
        warm-up that begins with a learning rate of 0. Only `load_weights` brings it, so the proof
        of a route shows nothing of it.
        """
        for loader, held in zip(self._loaders, all_held, strict=True):
            proven_with = loader.kept.proven_with
            if proven_with is None or self._proves_route:
                continue
            if not torch.equal(proven_with, held.digests):
                loader.kept.proven_with = None
        return any(loader.kept.proven_with is not None for loader in self._loaders)

    def undo(self) -> None:
        """Drop the saved plans that this session has proven: another TP rank has failed."""
        # The saved plan of that rank may be wrong, and then this one as well.
        for loader in self._trusted_here:
            loader.kept.forget("its proof has failed on another TP rank")
