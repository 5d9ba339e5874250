"""Code of both sides, trainer and engine. Imports no verl.

From SGLang only the function that forms a process group is imported.
"""
