# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.machine.memory import find_executable_batch_size as find_executable_batch_size

__all__: list[str]
