"""SGLang side of verl-sglang-sync: loads weight buckets inside the engine's processes."""
