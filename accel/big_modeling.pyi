# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.weights.device_hooks import (
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
)
from accel.weights.device_map import check_device_map as check_device_map
from accel.weights.device_map import get_balanced_memory as get_balanced_memory
from accel.weights.device_map import get_max_memory as get_max_memory
from accel.weights.device_map import infer_auto_device_map as infer_auto_device_map
from accel.weights.dispatch import cpu_offload as cpu_offload
from accel.weights.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
from accel.weights.dispatch import disk_offload as disk_offload
from accel.weights.dispatch import dispatch_model as dispatch_model
from accel.weights.folder import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel.weights.folder import extract_submodules_state_dict as extract_submodules_state_dict
from accel.weights.folder import offload_state_dict as offload_state_dict
from accel.weights.load import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accel.weights.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel.weights.load import load_state_dict as load_state_dict
from accel.weights.tensors import check_tied_parameters_in_config as check_tied_parameters_in_config
from accel.weights.tensors import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from accel.weights.tensors import find_tied_parameters as find_tied_parameters
from accel.weights.tensors import init_empty_weights as init_empty_weights
from accel.weights.tensors import init_on_device as init_on_device
from accel.weights.tensors import retie_parameters as retie_parameters

__all__: list[str]
