# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.machine.imports import compare_versions as compare_versions
from accel.machine.imports import is_torch_version as is_torch_version

__all__: list[str]
