# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.config.parallelism import ParallelismConfig as ParallelismConfig

__all__: list[str]
