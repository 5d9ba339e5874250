"""Benchmarks: each measures all its arms in one run and writes JSON of one schema."""
