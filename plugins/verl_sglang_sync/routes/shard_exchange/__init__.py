"""Trainer ranks give each other the parts of their shards that the engine's ranks read."""

from verl_sglang_sync.routes.shard_exchange.decisions import ShardExchange, SyncKind
from verl_sglang_sync.routes.shard_exchange.exchange_plan import whole_bucket

__all__ = ["ShardExchange", "SyncKind", "whole_bucket"]
