"""Process groups of a trainer and engines on other GPUs, and collectives in them."""
