# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.comm.rng import set_seed as set_seed
from accel.comm.rng import synchronize_rng_state as synchronize_rng_state
from accel.comm.rng import synchronize_rng_states as synchronize_rng_states

__all__: list[str]
