"""Adapters to verl's rollout, replica, checkpoint engine and exports."""
