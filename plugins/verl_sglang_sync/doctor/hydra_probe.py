"""Probe: asks Hydra, as a recipe would, whether it finds our plugin and composes the presets."""

from __future__ import annotations

from typing import Any

import msgspec

from verl_sglang_sync.config import PRESETS
from verl_sglang_sync.doctor.probe import write_facts

PLUGIN = "hydra_plugins.verl_sglang_sync.search_path.WeightSyncSearchPathPlugin"


class HydraFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What Hydra found.

    Attributes:
        discovered: our search-path plugin is among those that Hydra found by itself.
        sections: composed section by preset.
        errors: Hydra's message by preset that does not compose.
    """

    discovered: bool
    sections: dict[str, dict[str, Any]]
    errors: dict[str, str]


def collect() -> HydraFacts:
    """Look through Hydra's own discovery and composition; imports Hydra only."""
    from hydra import compose, initialize
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin
    from omegaconf import OmegaConf

    found = Plugins.instance().discover(SearchPathPlugin)
    sections, errors = {}, {}
    with initialize(version_base=None, config_path=None):
        for preset in PRESETS:
            try:
                config = compose(overrides=[f"+weight_sync={preset}"])
                section = config.actor_rollout_ref.rollout.custom.weight_sync
                container: Any = OmegaConf.to_container(section)
                sections[preset] = container
            except Exception as error:
                errors[preset] = f"{type(error).__name__}: {error}"
    return HydraFacts(
        discovered=PLUGIN in {f"{cls.__module__}.{cls.__qualname__}" for cls in found},
        sections=sections,
        errors=errors,
    )


if __name__ == "__main__":
    write_facts(collect())
