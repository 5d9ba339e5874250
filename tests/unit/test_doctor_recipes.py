"""What the doctor says of presets and recipes, composed by Hydra with verl's own."""

import pytest

from verl_sglang_sync.commands.doctor import presets
from verl_sglang_sync.commands.doctor.check import Status

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = ("model_engine=megatron", f"{ACTOR}.strategy=megatron")
COMPILED = presets.USUAL_RECIPE
SEPARATE = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=False")
DISAGGREGATED = (*presets.USUAL, *SEPARATE, "+weight_sync=disaggregated")
SECTION = f"{ROLLOUT}.custom.weight_sync"
PULL = "pull the trainer's parameters"


MINE = """
defaults: [{first}, {{weight_sync: compiled}}, _self_]
actor_rollout_ref: {{rollout: {{name: sglang, multi_stage_wake_up: true}}}}
"""
ALONE = "actor_rollout_ref: {rollout: {custom: {weight_sync: {mode: compiled}}}}\n"


class TestRecipe:
    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (COMPILED, "Later syncs pull the trainer's parameters. Sleep: kv_cache, weights."),
            (COMPILED, "Wake-up: weights, sync, kv_cache"),
            ((*COMPILED, f"{ROLLOUT}.multi_stage_wake_up=False"), "Wake-up: weights, kv_cache, sy"),
            ((*COMPILED, f"{ROLLOUT}.free_cache_engine=False"), "Nothing sleeps"),
            ((*COMPILED, *MEGATRON, f"{ROLLOUT}.tensor_model_parallel_size=2"), PULL),
            (
                (*COMPILED, *MEGATRON, f"{ACTOR}.megatron.vanilla_mbridge=True"),
                "Every sync makes the full export (no pull: megatron.vanilla_mbridge=True)",
            ),
            ((*COMPILED, f"{MODEL}.lora_rank=8"), "the full export (no pull: LoRA)"),
            ((*COMPILED, "trainer.nnodes=2"), f"{PULL}, and exchange shards between nodes"),
            (
                (*COMPILED, f"{SECTION}.routes=[exchange]"),
                "Later syncs exchange the trainer ranks' shards (no pull: routes=['exchange'])",
            ),
            (
                (*COMPILED, f"{SECTION}.routes=[pull]", "trainer.nnodes=2"),
                "Every sync makes the full export (no pull: trainer.nnodes=2, routes=['pull'])",
            ),
            (
                (*COMPILED, f"{SECTION}.routes=[]"),
                "Every sync makes the full export (no pull: routes=[])",
            ),
            (
                (*COMPILED, f"{ACTOR}.strategy=veomni"),
                "makes the full export (no pull: actor.strategy=veomni)",
            ),
            ((*COMPILED, f"{ACTOR}.strategy=fsdp"), PULL),
            ((*COMPILED, f"{ACTOR}.strategy=megatron"), PULL),  # without its section
            ((*COMPILED, f"{ACTOR}.fsdp_config.param_offload=True"), PULL),
            ((*COMPILED, f"{ROLLOUT}.quantization=fp8"), PULL),
            (
                (*COMPILED, f"{ROLLOUT}.checkpoint_engine.backend=nccl"),
                "(no pull: checkpoint_engine.backend=nccl)",
            ),
            ((*presets.USUAL, "+weight_sync=bucketed"), "full export (no pull: mode=flattened)"),
            ((*DISAGGREGATED, f"{SECTION}.mode=flattened"), "Nothing sleeps"),
            (DISAGGREGATED, f"{PULL}, and exchange shards between nodes. Nothing sleeps"),
            ((*DISAGGREGATED, f"{SECTION}.routes=[pull]"), f"{PULL}. Nothing sleeps"),
            ((*COMPILED, f"{SECTION}.report_file='/logs/${{now:%Y}}.jsonl'"), PULL),
        ],
    )
    def test_what_it_does_follows_from_the_config(self, overrides, said):
        *checks, last = presets.recipe_checks(overrides, 8)
        assert all(check.status is not Status.FAIL for check in checks)
        assert said in last.detail, last.detail

    def test_what_it_does_follows_from_the_machine(self):
        *_, last = presets.recipe_checks(COMPILED, 4)
        assert last.advice == "trainer.n_gpus_per_node=8, but 4 GPUs are visible here"
        *_, last = presets.recipe_checks((), 0)
        assert "exchange the trainer ranks' shards (no pull: no GPU here)" in last.detail
        assert "Nothing sleeps" in last.detail

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            ([*presets.USUAL, "+weight_sync=fastest"], ("find 'weight_sync/fastest'",)),
            (["actor_rollout_ref.rollut=1"], ("actor_rollout_ref.rollut",)),
            ([*COMPILED, f"{SECTION}.bukket=1"], ("bukket",)),
            ([*COMPILED, f"{SECTION}.on_fallback=1"], ("on_fallback=1: allowed",)),
            ([*COMPILED, f"+{SECTION}.host_backup=on"], ("host_backup='on': this key was",)),
            ([*COMPILED, "trainer.nnodes=two"], ("trainer.nnodes='two': expected a whole",)),
            ([*COMPILED, "trainer.n_gpus_per_node=0"], ("n_gpus_per_node=0: expected a whole",)),
            (
                [*COMPILED, f"{ROLLOUT}.quantization=torchao", f"{ROLLOUT}.name=vllm"],
                ("rollout.quantization='torchao'", "name='vllm'"),
            ),
        ],
    )
    def test_what_would_not_start_is_a_failure(self, overrides, said):
        (check,) = presets.recipe_checks(overrides, 8)
        assert (check.name, check.status) == ("recipe: preflight", Status.FAIL)
        assert all(text in check.detail for text in said)

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--config-dir=CONFIGS", "--config-name=mine", "trainer.nnodes=3"],
            ["-cd", "CONFIGS", "-cn", "mine.yaml", "trainer.nnodes=3"],
            ["trainer.nnodes=3", "--config-name", "mine", "--config-dir", "configs"],
            ["--config-path=CONFIGS", "--config-name=alone", "+trainer.nnodes=3"],
            ["--config-path=PACKAGE", "--config-name=alone", "+trainer.nnodes=3"],
            ["--cfg", "job", *COMPILED, "trainer.nnodes=3"],
            ["--config-name=ppo_megatron_trainer", *COMPILED, "trainer.nnodes=3"],
            ["--config-path=./config", *COMPILED, "trainer.nnodes=3"],
        ],
    )
    def test_a_recipe_may_give_hydras_options(self, arguments, tmp_path, monkeypatch):
        folder = tmp_path / "configs"
        folder.mkdir()
        (folder / "__init__.py").touch()
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        (folder / "mine.yaml").write_text(MINE.format(first="ppo_trainer"))
        (folder / "alone.yaml").write_text(ALONE)
        places = {"CONFIGS": str(folder), "PACKAGE": "pkg://configs"}
        for name, place in places.items():
            arguments = [each.replace(name, place) for each in arguments]
        config = presets.compose(arguments)
        assert config.trainer.nnodes == 3
        assert config.actor_rollout_ref.rollout.custom.weight_sync.mode == "compiled"

    def test_the_config_name_decides_what_it_does(self):
        *_, last = presets.recipe_checks(
            ["--config-name=ppo_megatron_trainer", *COMPILED, f"{ACTOR}.strategy=megatron"],
            8,
        )
        assert PULL in last.detail

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--config-name=no_such"], "Cannot find primary config 'no_such'"),
            (["--config-dir=/no/such"], "--config-dir=/no/such: there is no such folder"),
            (["--config-path=/no/such"], "/no/such"),
            (["--confg-name=x"], "main_ppo refuses: unrecognized arguments: --confg-name=x"),
            (["--conf=x"], "ambiguous option: --conf=x"),
            (["--experimental-rerun", "x"], "--experimental-rerun: allowed"),
            (["--config-name"], "--config-name/-cn: expected one argument"),
            (
                ["trainer.nnodes=1", "--config-name=ppo_trainer", "trainer.nnodes=2"],
                "unrecognized arguments: trainer.nnodes=2. Options stand before or after",
            ),
            (["--multirun", "trainer.nnodes=1,2"], "Ambiguous value"),
        ],
    )
    def test_options_that_main_ppo_refuses_are_a_failure(self, arguments, said):
        (check,) = presets.recipe_checks(arguments, 8)
        assert check.status is Status.FAIL
        assert said in check.detail

    def test_flags_without_effect_are_warnings(self):
        _, remark, last = presets.recipe_checks(presets.USUAL, 8)
        assert (remark.name, remark.status) == ("recipe: remark", Status.WARN)
        assert "has no effect without +weight_sync=<preset>" in remark.detail
        assert "verl's own weight sync" in last.detail
