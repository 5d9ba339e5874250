"""What each rank does in the tests of pulled parameters."""

from unittest import mock

import torch
import torch.distributed as dist

from sglang_loader.session.state import MappedMemory
from unit.route_ranks import TP, Rank


class PullRank(Rank):
    """A rank whose parameters are pulled; `spoils`: the engines' loaders change what they load."""

    def __init__(self, *, spoils=False, **options):
        super().__init__("pull", **options)
        for model in self.engine.models if spoils and self.engine is not None else ():
            model.adds = 0

    def sync_among_hosts(self, engines, trainers):
        """A sync where hosts have these names, with the replica's number in them."""
        with (
            mock.patch("sglang_loader.session.serve.host_id", lambda: name_in(engines)),
            mock.patch("verl_sglang_sync.routes.pull.route.host_id", lambda: name_in(trainers)),
        ):
            self.sync()

    def unmap(self):
        """The engines have nothing mapped any more, as after a restart; the handles are used."""
        for state in self.engine._states if self.engine is not None else ():
            for key, made in state.items():
                state[key] = MappedMemory() if isinstance(made, MappedMemory) else made

    def empty_storages(self):
        """From now on offloaded parameters come back into the same storages, at the same addresses
        perhaps.
        """
        self.export.sources.empties_storages = True

    def untie(self):
        """The head is a parameter of its own now, with other values."""
        head = torch.nn.Parameter(self.model.model.embed_tokens.weight.detach().clone())
        head.to_local().untyped_storage().share_memory_()
        self.model.lm_head.weight = head
        with torch.no_grad():
            head.to_local().add_(1)


def name_in(template):
    return template.format(dist.get_rank() // TP)
