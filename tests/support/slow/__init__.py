"""For SGLang (SGLANG_EXTERNAL_MODEL_PACKAGE): a model that takes its time for every token."""
