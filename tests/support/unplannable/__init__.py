"""Models for SGLang (SGLANG_EXTERNAL_MODEL_PACKAGE) that no load plan can be made of."""
