"""What routes "exchange" and "send" share: trainer ranks send of their shards what engines read."""
