"""Trainer ranks give each other the parts of their shards that the engine's ranks read."""

from verl_sglang_sync.routes.shard_exchange.decisions import ShardExchange, SyncKind

__all__ = ["ShardExchange", "SyncKind"]
