"""Random number generators, at the documented path: re-exports."""

from __future__ import annotations

from accel.comm.rng import (
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)

__all__ = [
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]
