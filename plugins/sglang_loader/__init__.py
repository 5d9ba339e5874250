"""SGLang side of verl-sglang-sync: it loads weight buckets inside the engine's processes."""
