"""Loaders, at the documented path: re-exports of `accel.data`."""

from __future__ import annotations

from accel.data.iterable import IterableDatasetShard
from accel.data.loaders import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.data.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "prepare_data_loader",
    "skip_first_batches",
]
