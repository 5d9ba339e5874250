"""Lets verl 0.9.1 train Qwen2.5-VL on text alone: `VERL_USE_EXTERNAL_MODULES`.

For a batch without images verl adds nothing times the mean of an empty image's features, so that
all parameters take part. transformers 5 returns these features in an object, which has no mean.
"""

from verl.models.transformers import qwen2_vl


def _input_embeds(model, input_ids, attention_mask, *images):
    assert images == (None,) * len(images)
    return model.get_input_embeddings()(input_ids), attention_mask


qwen2_vl._get_input_embeds = _input_embeds
