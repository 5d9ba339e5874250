"""Arranged buffers filled from the trainer ranks' shards, without the full export."""
