"""The environment's variables and this machine's CPUs: re-exports of the working modules."""

from __future__ import annotations

from accel.machine.env import (
    clear_environment,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)
from accel.machine.numa import override_numa_affinity, set_numa_affinity

__all__ = [
    "clear_environment",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]
