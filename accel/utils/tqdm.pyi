# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.run.progress import tqdm as tqdm

__all__: list[str]
