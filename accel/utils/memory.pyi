# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.machine.memory import clear_device_cache as clear_device_cache
from accel.machine.memory import find_executable_batch_size as find_executable_batch_size
from accel.machine.memory import release_memory as release_memory
from accel.machine.memory import should_reduce_batch_size as should_reduce_batch_size

__all__: list[str]
