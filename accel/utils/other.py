"""Functions on models and files, at the documented path: re-exports."""

from __future__ import annotations

from accel.checkpoint.export import save
from accel.checkpoint.serialization import load
from accel.large.sizes import convert_bytes
from accel.launch_config import write_basic_config
from accel.launchers import is_port_in_use
from accel.ops import wait_for_everyone
from accel.tree import merge_dicts
from accel.wrapping import (
    extract_model_from_parallel,
    get_module_children_bottom_up,
    is_compiled_module,
)

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
