"""Route "send": all trainer ranks send parts of their shards to engines on other devices."""
