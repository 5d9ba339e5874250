"""verl's own recipes, composed by Hydra as `python -m verl.trainer.main_ppo` does it."""

from importlib.util import find_spec
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir

ROLLOUT = "actor_rollout_ref.rollout"
SECTION = f"{ROLLOUT}.custom.weight_sync"


def compose(*overrides, config_name="ppo_trainer", rollout="sglang"):
    """Compose a recipe with `overrides`; importing verl (7 s) is not needed for it."""
    (verl,) = find_spec("verl").submodule_search_locations
    chosen = [] if rollout is None else [f"{ROLLOUT}.name={rollout}"]
    with initialize_config_dir(str(Path(verl) / "trainer" / "config"), version_base=None):
        return hydra_compose(config_name, [*chosen, *overrides])
