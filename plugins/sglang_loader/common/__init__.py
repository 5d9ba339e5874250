"""What both sides share: numbers and messages.

Imports no verl, and of SGLang only how it forms a process group.
"""
