"""Code of both sides, trainer and engine. Imports no verl, and of SGLang only how it forms a
process group.
"""
