"""Proof that a sync brings the same bytes that the engine holds already.

Two syncs of the same weights must leave the same bytes. In the proof "route" the trainer sends the
weights of an exported sync once more, by the route that it wants to use from then on. Each engine
rank does this:

1. `HeldWeights.of(loaders)` takes a digest of every storage that the models reach.
2. `poison` fills every byte that the load plans write with a pattern.
3. The whole sync runs, over the same memory, sockets and process groups as later syncs.
4. `differing` takes the digests again, and names the tensors of storages that changed.

If a byte comes from a wrong place, or does not come, the digests differ. One fault stays unseen: a
swap of tensors that hold the same bytes in this sync, such as norms that are all ones. `has_alike`
finds such tensors. The trainer repeats the proof when they may have become different. In the proof
"served" the weights come by the export instead, and nothing is poisoned. Digests are taken on the
device, and read each storage once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_loader.common.digest import digests_on_host
from sglang_loader.load_plan.destinations import (
    Destinations,
    collect_destinations,
    first_difference,
)
from sglang_loader.load_plan.verify import POISON
from sglang_loader.session.model_loader import ModelLoader


class Differs(RuntimeError):
    """A failed proof: the sync has left other bytes than the engine held, in the named tensors."""


class SavedPlanDiffers(Differs):
    """A failed proof of a load plan that an earlier process has saved."""


@dataclass(frozen=True)
class HeldWeights:
    """The digests of the weights that the models of one engine rank held when a sync began.

    Attributes:
        loaders: of the models.
        destinations: by model, every storage that the model reaches.
        held: by model, the digests of these storages: int64 `[num_storages, 2]` on the host.
    """

    loaders: Sequence[ModelLoader]
    destinations: Sequence[Destinations]
    held: Sequence[torch.Tensor]

    @classmethod
    def of(cls, loaders: Sequence[ModelLoader]) -> HeldWeights:
        """Take the digests of the models' present bytes."""
        reached = [collect_destinations(loader.model) for loader in loaders]
        held = [digests_on_host(destinations.memory) for destinations in reached]
        return cls(loaders, reached, held)

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
        for loader, before, held in zip(self.loaders, self.destinations, self.held, strict=True):
            # A route does not write the other storages, so it cannot swap them.
            written = loader.plan.coverage if loader.plan is not None else {}
            pairs = zip(before.storages, held.tolist(), strict=True)
            seen.update((s.nbytes, *digest) for s, digest in pairs if s.name in written)
        return any(count > 1 for count in seen.values())

    def differing(self) -> list[str]:
        """Return the names of tensors whose storages hold other bytes than before, or moved."""
        names: list[str] = []
        for loader, before, held in zip(self.loaders, self.destinations, self.held, strict=True):
            # A storage at another address has no digest from before.
            moved = first_difference(before, collect_destinations(loader.model))
            if moved is not None:
                names.append(moved)
            changed = (
                (digests_on_host(before.memory) != held).any(dim=1).nonzero().flatten().tolist()
            )
            names += [name for storage in changed for name in before.names_of(storage)]
        return names
