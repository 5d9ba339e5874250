"""Common to routes "exchange" and "send": trainer ranks send the parts of shards that are read."""
