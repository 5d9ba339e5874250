"""Common code of routes "exchange" and "send": trainer ranks send parts of their shards."""
