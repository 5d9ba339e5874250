"""Copies of strided bytes: many in few launches, by a Triton kernel or by torch."""
