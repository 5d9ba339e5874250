"""The architectures that a load plan is proved on: a few thousand weights each.

Values are as small as the classes allow. Where SGLang reads a configuration field that transformers
no longer writes, or expects checkpoint names that it no longer saves, the case supplies what the
hub's checkpoints have.
"""

from typing import Any

from contract.tiny_architectures import Case

Options = dict[str, Any]

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": 16}
_TIED = {"tie_word_embeddings": True}
_UNTIED = {"tie_word_embeddings": False}
"""As on the hub, and in SGLang; transformers ties them if the configuration does not say so."""
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_CONV = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
_MAMBA = {"d_ssm": 64, "n_heads": 4, "d_head": 16, "d_state": 16, "n_groups": 1}
_NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads_cpu": 2,
    "linear_num_value_heads_cpu": 4,
    "linear_value_head_dim": 16,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_MOE = {**_ROUTED_MOE, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LLAMA4_MOE = {
    **_LOCAL_MOE,
    **_HEAD,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 96,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_MLA = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "rope_parameters": _YARN,
    **_SHARED_MOE,
    "n_group": 2,
    "topk_group": 1,
    "moe_layer_freq": 1,
}
_SOFTMAX, _SIGMOID = {"scoring_func": "softmax"}, {"scoring_func": "sigmoid"}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_ROPE = {"rope_parameters": _MROPE}
_PARTIAL_ROPE = {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}
_QWEN_VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "in_chans": 3,
}
_SMALL_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
}
_QWEN25_VISION = {
    **_SMALL_VISION,
    "patch_size": 14,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
_QWEN3_VISION = {
    **_SMALL_VISION,
    "patch_size": 16,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
_GLM_VISION = {**_QWEN25_VISION, "image_size": 56}
_TRANSFORMER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_SIGLIP = {**_TRANSFORMER, "image_size": 56, "patch_size": 14}
_MLLAMA_VISION = {
    **_SIGLIP,
    "attention_heads": 2,
    "num_global_layers": 1,
    "vision_output_dim": 64,
    "intermediate_layers_indices": [0],
    "max_num_tiles": 2,
    "supported_aspect_ratios": [[1, 1], [1, 2]],
}
_LLAMA4_VISION = {
    **_SIGLIP,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}

_CASE_FIELDS = ("attention_backend", "renamed", "transposed", "architecture", "server")


def _case(name, stem, kind, options, **parts):
    special = {key: options.pop(key) for key in _CASE_FIELDS if key in options}
    config = options.pop("config", f"{stem}Config")
    model = options.pop("model", f"{stem}For{kind}")
    return Case(name, config, model, options, **parts, **special)


def _text(name, stem, *groups, **options):
    """A language model of transformers' classes `<stem>Config` and `<stem>ForCausalLM`."""
    merged = {**_TEXT}
    for group in (*groups, options):
        merged |= group
    return _case(name, stem, "CausalLM", merged)


def _vision(name, stem, text, vision, **options):
    """A model that sees; `text` and `vision` are what its two parts have of their own."""
    parts = {"text": {**_TEXT, **text}, "vision": vision}
    return _case(name, stem, "ConditionalGeneration", options, **parts)


CASES = (
    _text("llama", "Llama"),
    _text("llama-tied", "Llama", _TIED),
    _text("mistral", "Mistral", _HEAD),
    _text("qwen2", "Qwen2"),
    _text("qwen2-tied", "Qwen2", _TIED),
    _text("qwen3", "Qwen3", _HEAD),
    _text("qwen3-tied", "Qwen3", _HEAD, _TIED),
    _text("gemma", "Gemma", _HEAD),
    _text("gemma2", "Gemma2", _HEAD, hidden_act="gelu_pytorch_tanh"),
    _text("gemma3-text", "Gemma3", _HEAD, config="Gemma3TextConfig"),
    _text("phi", "Phi"),
    _text("phi3", "Phi3"),
    _text("granite", "Granite"),
    _text("olmo", "Olmo"),
    _text("olmo2", "Olmo2"),
    _text("cohere", "Cohere"),
    _text("cohere2", "Cohere2"),
    _text("stablelm", "StableLm"),
    _text("starcoder2", "Starcoder2"),
    _text("glm4", "Glm4", _HEAD),
    _text("apertus", "Apertus"),
    _text("arcee", "Arcee"),
    _text("ernie4_5", "Ernie4_5"),
    _text("hunyuan-dense", "HunYuanDenseV1", _HEAD, use_qk_norm=True),
    _text("seed-oss", "SeedOss", _HEAD),
    _text("gpt2", "GPT2", _GPT, model="GPT2LMHeadModel"),
    _text("gpt-bigcode", "GPTBigCode", _GPT),
    _text("gptj", "GPTJ", n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
    _text("opt", "OPT", ffn_dim=96, word_embed_proj_dim=64),
    _text("persimmon", "Persimmon"),
    _text("lfm2", "Lfm2", _CONV),
    _text("falcon-h1", "FalconH1", _HEAD, {f"mamba_{key}": value for key, value in _MAMBA.items()}),
    _text("qwen2-moe", "Qwen2Moe", _MOE, shared_expert_intermediate_size=32),
    _text("qwen3-moe", "Qwen3Moe", _MOE, _HEAD),
    _text("qwen3-next", "Qwen3Next", _MOE, _HEAD, _LINEAR, shared_expert_intermediate_size=32),
    _text("mixtral", "Mixtral", _LOCAL_MOE),
    _text("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2, num_key_value_heads=4),
    _text("phimoe", "Phimoe", _LOCAL_MOE, architecture="PhiMoEForCausalLM"),
    _text("granitemoe", "GraniteMoe", _LOCAL_MOE),
    _text(
        "gpt-oss",
        "GptOss",
        _LOCAL_MOE,
        _HEAD,
        {"intermediate_size": 64, "swiglu_limit": 7.0},
        attention_backend="triton",
        # SGLang chooses `triton_kernel`, whose layout its loader only gets right on a GPU.
        server={"moe_runner_backend": "triton"},
    ),
    _text("glm4-moe", "Glm4Moe", _SHARED_MOE, _HEAD, n_group=1, topk_group=1),
    _text(
        "ernie4_5-moe",
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2},
        moe_intermediate_size=32,
        moe_layer_start_index=1,
    ),
    _text("minimax-m2", "MiniMaxM2", _LOCAL_MOE, _HEAD, _SIGMOID, use_qk_norm=True, rotary_dim=8),
    _text("afmoe", "Afmoe", _MOE, _HEAD, num_dense_layers=1, num_shared_experts=1),
    _text("lfm2-moe", "Lfm2Moe", _MOE, _CONV, num_dense_layers=1),
    _text("deepseek-v2-lite", "DeepseekV2", _MLA, _SOFTMAX, q_lora_rank=None),
    _text("deepseek-v2", "DeepseekV2", _MLA, _SOFTMAX, q_lora_rank=24),
    _text("deepseek-v3", "DeepseekV3", _MLA, _SIGMOID, q_lora_rank=24, topk_method="noaux_tc"),
    _text("glm4-moe-lite", "Glm4MoeLite", _MLA, q_lora_rank=24),
    _text("llama4-text", "Llama4", _LLAMA4_MOE, config="Llama4TextConfig"),
    _vision("qwen2-vl", "Qwen2VL", _ROPE, _QWEN_VISION),
    _vision("qwen2_5-vl", "Qwen2_5_VL", _ROPE, _QWEN25_VISION),
    _vision("qwen3-vl", "Qwen3VL", {**_ROPE, **_HEAD}, _QWEN3_VISION),
    _vision(
        "qwen3-vl-moe",
        "Qwen3VLMoe",
        # transformers tells by the shape whether it has to transpose what it loads.
        {**_ROPE, **_MOE, **_HEAD, "moe_intermediate_size": 48},
        _QWEN3_VISION,
        transposed=r"experts\.(gate_up|down)_proj$",
    ),
    _vision(
        "gemma3",
        "Gemma3",
        _HEAD,
        {**_SIGLIP, "vision_use_head": False},
        mm_tokens_per_image=4,
        renamed=((r"^vision_tower\.", "vision_tower.vision_model."),),
    ),
    _vision("glm4v", "Glm4v", _ROPE, _GLM_VISION),
    _vision(
        "mistral3",
        "Mistral3",
        {"model_type": "mistral", **_HEAD},
        {"model_type": "pixtral", **_SIGLIP, "head_dim": 16},
        **_UNTIED,
    ),
    _vision("idefics2", "Idefics2", {"model_type": "mistral", **_HEAD}, _SIGLIP),
    _vision("mllama", "Mllama", {"cross_attention_layers": [1]}, _MLLAMA_VISION),
    _vision(
        "llama4",
        "Llama4",
        {**_LLAMA4_MOE, "original_total_num_kv_heads": 2, "original_num_attention_heads": 4},
        _LLAMA4_VISION,
    ),
    _text(
        "gemma4-text",
        "Gemma4",
        _HEAD,
        _PER_LAYER,
        config="Gemma4TextConfig",
        num_kv_shared_layers=0,
        global_head_dim=16,
        attention_backend="triton",
    ),
    _text(
        "gemma3n-text",
        "Gemma3n",
        _HEAD,
        _PER_LAYER,
        config="Gemma3nTextConfig",
        laurel_rank=8,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _text(
        "nemotron-h",
        "NemotronH",
        _HEAD,
        _NEMOTRON,
        renamed=((r"^backbone\.embedding\.", "backbone.embeddings."),),
    ),
    _text("solar-open", "SolarOpen", _ROUTED_MOE, _HEAD, n_shared_experts=1),
    _vision("qwen3_5", "Qwen3_5", {**_PARTIAL_ROPE, **_LINEAR, **_HEAD}, _QWEN3_VISION),
    _vision("glm4v-moe", "Glm4vMoe", {**_PARTIAL_ROPE, **_SHARED_MOE, **_HEAD}, _GLM_VISION),
    _vision(
        "gemma4",
        "Gemma4",
        {**_PER_LAYER, **_HEAD},
        {**_TRANSFORMER, "num_key_value_heads": 2, "head_dim": 16},
        attention_backend="triton",
        audio_config=None,
    ),
    _vision(
        "internvl",
        "InternVL",
        {"model_type": "qwen2"},
        {**_SIGLIP, "image_size": [56, 56], "patch_size": [14, 14]},
        **_UNTIED,
    ),
    _vision(
        "lfm2-vl",
        "Lfm2Vl",
        {**_CONV, "model_type": "lfm2"},
        {"model_type": "siglip2_vision_model", **_SIGLIP, "num_patches": 16},
        renamed=((r"\.vision_tower\.", ".vision_tower.vision_model."),),
    ),
    _vision("paddleocr-vl", "PaddleOCRVL", {**_ROPE, **_HEAD, **_UNTIED}, _SIGLIP, **_UNTIED),
)


def case_named(name):
    return next(case for case in CASES if case.name == name)
