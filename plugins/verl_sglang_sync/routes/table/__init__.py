"""The route by the copy table: engines read shards that they can map, and are sent the others."""
