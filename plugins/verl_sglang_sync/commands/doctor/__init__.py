"""`verl-sglang-sync doctor`: checks the installation, this machine, and a recipe.

A check is a function that returns a `Check`. A check that needs verl, SGLang or the GPU runs in a
new process (`run_probe`), which starts as verl's and SGLang's processes do.
"""
