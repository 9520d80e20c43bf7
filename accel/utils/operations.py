"""Operations on nested tensors, at the documented path: re-exports."""

from __future__ import annotations

from accel.comm.ops import (
    ConvertOutputsToFp32,
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    gather,
    gather_object,
    listify,
    pad_across_processes,
    reduce,
    send_to_device,
    slice_tensors,
)
from accel.machine.tree import (
    honor_type,
    is_namedtuple,
    recursively_apply,
)
from accel.machine.tree import is_tensor as is_torch_tensor

__all__ = [
    "ConvertOutputsToFp32",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "gather",
    "gather_object",
    "honor_type",
    "is_namedtuple",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]
