"""Core's own dealing of global batches, for a backend that knows better than core which ranks are data-parallel."""

from __future__ import annotations

from fleettune_core.data.sharding import GlobalBatchSampler
from fleettune_core.types import BatchSampler, DataShard, ShardedData


def deal_rows(dataset: ShardedData, shard: DataShard) -> BatchSampler:
    """The micro-batches of `shard`, as core deals them: the same rows per step on every layout, by length."""
    return GlobalBatchSampler(dataset, shard)
