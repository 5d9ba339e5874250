"""Checks of this project's own text, run by `make lint`."""
