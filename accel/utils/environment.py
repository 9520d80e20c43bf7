"""The environment's variables and this machine's CPUs: re-exports of the working modules."""

from __future__ import annotations

from accel.env import clear_environment, patch_environment, purge_accelerate_environment
from accel.numa import override_numa_affinity, set_numa_affinity

__all__ = [
    "clear_environment",
    "override_numa_affinity",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
]
