"""Buckets that the engines read in the trainer ranks' parameters."""
