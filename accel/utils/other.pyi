# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.checkpoint.export import save as save
from accel.checkpoint.serialization import load as load
from accel.comm.ops import wait_for_everyone as wait_for_everyone
from accel.commands.launch_config import write_basic_config as write_basic_config
from accel.launchers import is_port_in_use as is_port_in_use
from accel.machine.tree import merge_dicts as merge_dicts
from accel.precision.wrapping import extract_model_from_parallel as extract_model_from_parallel
from accel.precision.wrapping import get_module_children_bottom_up as get_module_children_bottom_up
from accel.precision.wrapping import is_compiled_module as is_compiled_module
from accel.weights.sizes import convert_bytes as convert_bytes

__all__: list[str]
