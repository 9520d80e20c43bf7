# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.machine.env import clear_environment as clear_environment
from accel.machine.env import get_int_from_env as get_int_from_env
from accel.machine.env import parse_choice_from_env as parse_choice_from_env
from accel.machine.env import parse_flag_from_env as parse_flag_from_env
from accel.machine.env import patch_environment as patch_environment
from accel.machine.env import purge_accelerate_environment as purge_accelerate_environment
from accel.machine.env import str_to_bool as str_to_bool
from accel.machine.numa import override_numa_affinity as override_numa_affinity
from accel.machine.numa import set_numa_affinity as set_numa_affinity

__all__: list[str]
