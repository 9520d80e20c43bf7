"""Functions on models and files, at the documented path: re-exports."""

from __future__ import annotations

from accel.checkpoint.export import save
from accel.checkpoint.serialization import load
from accel.comm.ops import wait_for_everyone
from accel.commands.launch_config import write_basic_config
from accel.launchers import is_port_in_use
from accel.machine.tree import merge_dicts
from accel.precision.wrapping import (
    extract_model_from_parallel,
    get_module_children_bottom_up,
    is_compiled_module,
)
from accel.weights.sizes import convert_bytes

__all__ = [
    "convert_bytes",
    "extract_model_from_parallel",
    "get_module_children_bottom_up",
    "is_compiled_module",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "save",
    "wait_for_everyone",
    "write_basic_config",
]
