# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.weights.attach_hooks import attach_align_device_hook as attach_align_device_hook
from accel.weights.attach_hooks import (
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
)
from accel.weights.attach_hooks import attach_execution_device_hook as attach_execution_device_hook
from accel.weights.device_hooks import CpuOffload as CpuOffload
from accel.weights.device_hooks import LayerwiseCastingHook as LayerwiseCastingHook
from accel.weights.device_hooks import UserCpuOffloadHook as UserCpuOffloadHook
from accel.weights.hooks import ModelHook as ModelHook
from accel.weights.hooks import SequentialHook as SequentialHook
from accel.weights.hooks import add_hook_to_module as add_hook_to_module
from accel.weights.hooks import remove_hook_from_module as remove_hook_from_module
from accel.weights.hooks import remove_hook_from_submodules as remove_hook_from_submodules
from accel.weights.offload import AlignDevicesHook as AlignDevicesHook

__all__: list[str]
