"""`verl-sglang-sync doctor`: checks the installation, this machine, and a recipe."""
