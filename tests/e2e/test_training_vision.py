"""Real verl training of Qwen2.5-VL's shape on the CPU, on text: the weights arrive.

Its checkpoint has other names than the trainer's model. The engine starts from random weights, and
the probabilities of the sampled tokens agree only if the first sync arrived. The trained weights
are proven on the engine.
"""

import json
import shutil
from dataclasses import dataclass

import pytest
import torch
import transformers
from quickstart import read_steps
from tiny_assets import CHAT_TEMPLATE, byte_tokenizer, make_assets

from support.training import FINDING_TESTS, Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

VOCABULARY = 320
OF_IMAGES = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def make_model(folder):
    """Write a random model with its processor to `folder`."""
    tokenizer = byte_tokenizer()
    # The tokens of images lie behind those that the model can sample.
    tokenizer.add_tokens([f"<unused{i}>" for i in range(VOCABULARY - len(tokenizer))])
    special = ["<|im_start|>", *OF_IMAGES.values()]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in OF_IMAGES.items()}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,  # wide, so that a stale weight shows in the probabilities
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10000.0,
        },
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **ids
    )
    torch.manual_seed(0)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


@dataclass(frozen=True)
class VisionRun(Run):
    def prepare(self, folder):
        make_assets(folder)
        shutil.rmtree(folder / "model")
        make_model(folder / "model")


RUN = VisionRun(
    "compiled",
    overrides=(
        # In later steps verl 0.9.1 may fail to split a batch: it has nested tensors of three
        # dimensions there, the positions.
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.custom.weight_sync.prove_every_n_syncs=1",
    ),
    variables=(*FINDING_TESTS, "VERL_USE_EXTERNAL_MODULES=support.text_of_vision"),
)


@pytest.mark.parametrize("trained", [RUN], indirect=True, ids=["qwen2_5-vl"])
def test_weights_arrive_under_the_names_of_the_checkpoint(trained):
    [step] = read_steps(trained)
    assert step.arrived, step.metrics
    assert step.metrics["actor/grad_norm"] > 0.1, "the weights must have moved"
    reports = list(map(json.loads, (trained / "syncs.jsonl").read_text().splitlines()))
    replayed = [report["num_replayed"] / report["num_buckets"] for report in reports]
    assert replayed == [0, 1], "by the load plan, once the first sync has made it"
    assert reports[1]["is_proven"]
