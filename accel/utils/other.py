"""Functions on models and files, at the documented path: re-exports."""

from __future__ import annotations

from accel.checkpoint.export import save
from accel.checkpoint.serialization import load
from accel.ops import wait_for_everyone
from accel.wrapping import (
    extract_model_from_parallel,
    get_module_children_bottom_up,
    is_compiled_module,
)

__all__ = [
    "extract_model_from_parallel",
    "get_module_children_bottom_up",
    "is_compiled_module",
    "load",
    "save",
    "wait_for_everyone",
]
