"""Disaggregated: the process group of a trainer and its engines, and a broadcast in it."""
