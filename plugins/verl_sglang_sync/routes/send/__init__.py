"""Buckets that all trainer ranks send to engines on other devices, each of its own shards."""
