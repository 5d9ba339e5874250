"""Hydra config group `weight_sync`, put on every verl recipe's search path by `hydra_plugins`."""
