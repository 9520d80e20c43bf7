# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.comm.ops import ConvertOutputsToFp32 as ConvertOutputsToFp32
from accel.comm.ops import broadcast as broadcast
from accel.comm.ops import broadcast_object_list as broadcast_object_list
from accel.comm.ops import concatenate as concatenate
from accel.comm.ops import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accel.comm.ops import convert_to_fp32 as convert_to_fp32
from accel.comm.ops import find_batch_size as find_batch_size
from accel.comm.ops import gather as gather
from accel.comm.ops import gather_object as gather_object
from accel.comm.ops import listify as listify
from accel.comm.ops import pad_across_processes as pad_across_processes
from accel.comm.ops import reduce as reduce
from accel.comm.ops import send_to_device as send_to_device
from accel.comm.ops import slice_tensors as slice_tensors
from accel.machine.tree import honor_type as honor_type
from accel.machine.tree import is_namedtuple as is_namedtuple
from accel.machine.tree import is_tensor as is_tensor
from accel.machine.tree import recursively_apply as recursively_apply

__all__: list[str]
is_torch_tensor = is_tensor
