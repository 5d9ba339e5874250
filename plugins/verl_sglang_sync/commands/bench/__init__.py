"""The benchmark of `verl-sglang-sync bench`: colocated syncs on the first GPU, or on the CPU."""
