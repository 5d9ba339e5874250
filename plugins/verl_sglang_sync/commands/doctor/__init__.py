"""`verl-sglang-sync doctor`: checks the installation, this machine, and what a recipe would do.

A check is one function that returns a `Check`. Those that need verl, sglang or the GPU run in a new
process (`run_probe`), which starts as verl's and SGLang's processes do.
"""
