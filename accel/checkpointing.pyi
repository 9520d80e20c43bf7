# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.checkpoint.directory import is_complete as is_complete
from accel.checkpoint.directory import newest_complete as newest_complete
from accel.checkpoint.directory import prune as prune
from accel.checkpoint.directory import read_manifest as read_manifest
from accel.checkpoint.directory import verify as verify

__all__: list[str]
