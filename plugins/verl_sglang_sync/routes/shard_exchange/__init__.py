"""Trainer ranks give each other the parts of their shards that the engine's ranks read."""

from verl_sglang_sync.routes.shard_exchange.exchange_plan import whole_bucket
from verl_sglang_sync.routes.shard_exchange.shard_exchange import ShardExchange, SyncKind

__all__ = ["ShardExchange", "SyncKind", "whole_bucket"]
