"""Puts the config group `weight_sync` on the search path of every Hydra application."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class WeightSyncSearchPathPlugin(SearchPathPlugin):
    """The plugin by which verl's recipes find the presets of `+weight_sync=<preset>`.

    Source: https://hydra.cc/docs/advanced/plugins/overview/
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append our config package, so that a recipe's own files of the same name win."""
        search_path.append(provider="verl-sglang-sync", path="pkg://verl_sglang_sync.conf")
