"""The plugin of fully sharded training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FullyShardedDataParallelPlugin:
    """How FSDP2 shards a model."""
