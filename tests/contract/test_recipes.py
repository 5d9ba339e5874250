"""Every recipe composes against the installed verl's own config, and passes its checks and ours.

The scripts are run as a user runs them, most with a `python` that says what it is given.
"""

import os
import sys
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from support.processes import run_process
from unit.composed_recipe import compose

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPTS = sorted(path.name for path in RECIPES.glob("*.sh"))
PRESETS = {"ppo_fsdp_gpu.sh": {"WEIGHT_SYNC": "flattened"}}  # the others: the default


def run_recipe(script, *arguments, cwd, python, **environment):
    """Run a script that finds its `python` in the folder `python`."""
    path = f"{python}{os.pathsep}{os.environ['PATH']}"
    environment |= {"PATH": path, "HYDRA_FULL_ERROR": "0"}
    return run_process(str(RECIPES / script), *arguments, cwd=cwd, environment=environment)


def composed(script, *overrides, folder, **environment):
    """The effective config of a script: what it hands to verl's trainer, composed here."""
    python = folder / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    result = run_recipe(script, *overrides, cwd=folder, python=folder, **environment)
    assert result.returncode == 0, result.stderr[-4000:]
    option, module, *given = result.stdout.splitlines()
    assert (option, module) == ("-m", "verl.trainer.main_ppo")
    config = compose(*given, rollout=None)
    OmegaConf.resolve(config)
    return config


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model's config and tokenizer, because verl's own checks read the critic's."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(hidden_size=64, num_hidden_layers=2, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    tokenizer = Tokenizer(BPE(vocab={"a": 0, "b": 1}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="b").save_pretrained(folder)
    return folder


def test_all_recipes_are_here():
    assert len(SCRIPTS) == 5


@pytest.mark.parametrize("script", SCRIPTS)
def test_recipe_composes_with_our_flags(script, model_folder, tmp_path):
    import verl.utils.config
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    from verl_sglang_sync.preflight import check_recipe

    config = composed(
        script,
        "trainer.project_name=from_the_command_line",
        "actor_rollout_ref.rollout.custom.weight_sync.request_timeout_s=77",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512",
        folder=tmp_path,
        MODEL=str(model_folder),
        **PRESETS.get(script, {}),
    )

    assert config.trainer.project_name == "from_the_command_line"
    settings = check_recipe(config)
    assert settings is not None
    separate = script == "grpo_separate_async_gpu.sh"
    assert settings.mode == PRESETS.get(script, {}).get("WEIGHT_SYNC", "compiled")
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    assert backend == ("sglang_sync" if separate else "naive")
    assert settings.multi_stage_wake_up is not separate
    assert settings.request_timeout_s == 77
    assert settings.bucket_bytes == 512 << 20
    assert need_critic(config) == script.startswith("ppo")
    # What verl itself checks before Ray starts (our check runs inside it once more).
    verl.utils.config.validate_config(config, need_reference_policy(config), need_critic(config))


def test_unknown_key_fails_before_ray(tmp_path, preloaded):
    """Ray would look for the cluster that it is told of, which nobody serves, and fail first."""
    key = "actor_rollout_ref.rollout.custom.weight_sync.bukket"
    with pytest.raises(ConfigCompositionException, match="bukket"):
        composed("grpo_fsdp_gpu.sh", f"{key}=1", folder=tmp_path)
    options = {"python": Path(sys.executable).parent, "RAY_ADDRESS": "127.0.0.1:1", **preloaded}
    result = run_recipe("grpo_fsdp_gpu.sh", f"+{key}=1", cwd=tmp_path, **options)
    assert result.returncode != 0
    for text in ("custom.weight_sync.bukket=1", "allowed", "request_timeout_s"):
        assert text in result.stderr, result.stderr[-4000:]
