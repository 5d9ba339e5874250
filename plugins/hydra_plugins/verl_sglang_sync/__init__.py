"""Hydra plugin of verl-sglang-sync. `hydra_plugins` itself is a namespace package."""
