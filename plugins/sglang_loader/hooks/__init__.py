"""Hooks that SGLang calls: one module for each kind of request."""
