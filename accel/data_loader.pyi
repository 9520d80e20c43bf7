# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.data.loaders import DataLoaderDispatcher as DataLoaderDispatcher
from accel.data.loaders import DataLoaderShard as DataLoaderShard
from accel.data.loaders import SkipDataLoader as SkipDataLoader
from accel.data.prepare import prepare_data_loader as prepare_data_loader
from accel.data.prepare import skip_first_batches as skip_first_batches
from accel.data.samplers import BatchSamplerShard as BatchSamplerShard
from accel.data.samplers import SeedableRandomSampler as SeedableRandomSampler
from accel.data.samplers import SkipBatchSampler as SkipBatchSampler
from accel.data.stream import IterableDatasetShard as IterableDatasetShard

__all__: list[str]
