"""One tiny SGLang model that was loaded once, two sets of weights for it, and its loader."""

from contract.load_plan_proof import load_eagerly, split, sync
from contract.tiny_architectures import (
    build_model,
    finish_loading,
    random_weights,
    save_checkpoint,
)
from contract.weight_check_proof import specs_of
from sglang_loader.load_plan.destinations import collect_destinations
from sglang_loader.session.model_loader import ModelLoader
from support.plan_check import differing, snapshot


class TinyEngine:
    """See the module.

    Args:
        case: the architecture.
        folder: gets the checkpoint.
        ranks: of this process and the others.
        sent_as: what becomes of exported weights before they are sent.
        once_built: called with the model before its first load.
        arguments: more of SGLang's `ServerArgs`.

    Raises:
        CannotBuild: the class cannot be built here.
    """

    def __init__(
        self, case, folder, ranks, *, sent_as=list, once_built=lambda _: None, **arguments
    ):
        like = save_checkpoint(case, folder)
        self.name = case.name
        self.first, self.second = (list(sent_as(random_weights(like, seed))) for seed in (1, 2))
        self.specs = specs_of(self.first)
        self.model = build_model(case, folder, ranks, **arguments)
        once_built(self.model)
        self.model.load_weights(iter(self.first))
        if sent_as is list:  # else it is quantised, as it stays
            finish_loading(self.model)
        self.loader = ModelLoader(self.model)

    def sync(self, weights, how="many"):
        """One sync as a session makes it."""
        return sync(self.loader, self.model, weights, how)

    def eager(self, weights):
        """What SGLang's own loader leaves; the model is as it was before."""
        destinations = collect_destinations(self.model)
        before = snapshot(destinations)
        load_eagerly(self.model, split(weights, "many"))
        after = snapshot(destinations)
        for i, kept in enumerate(before):
            destinations.memory[i].copy_(kept)
        return after

    def has(self, expected):
        """True if every storage holds these bytes."""
        return differing(collect_destinations(self.model), expected) == ()
