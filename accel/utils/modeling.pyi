# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.precision.amp import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accel.precision.wrapping import is_peft_model as is_peft_model
from accel.strategies.mesh.gradients import get_grad_scaler as get_grad_scaler
from accel.weights.device_map import check_device_map as check_device_map
from accel.weights.device_map import clean_device_map as clean_device_map
from accel.weights.device_map import get_balanced_memory as get_balanced_memory
from accel.weights.device_map import get_max_memory as get_max_memory
from accel.weights.device_map import infer_auto_device_map as infer_auto_device_map
from accel.weights.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel.weights.load import load_state_dict as load_state_dict
from accel.weights.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel.weights.sizes import compute_module_sizes as compute_module_sizes
from accel.weights.sizes import compute_module_total_buffer_size as compute_module_total_buffer_size
from accel.weights.sizes import convert_file_size_to_int as convert_file_size_to_int
from accel.weights.sizes import dtype_byte_size as dtype_byte_size
from accel.weights.sizes import get_max_layer_size as get_max_layer_size
from accel.weights.sizes import get_module_leaves as get_module_leaves
from accel.weights.state import align_module_device as align_module_device
from accel.weights.state import get_state_dict_from_offload as get_state_dict_from_offload
from accel.weights.state import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from accel.weights.state import has_offloaded_params as has_offloaded_params
from accel.weights.state import load_offloaded_weights as load_offloaded_weights
from accel.weights.tensors import check_device_same as check_device_same
from accel.weights.tensors import check_tied_parameters_in_config as check_tied_parameters_in_config
from accel.weights.tensors import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from accel.weights.tensors import find_tied_parameters as find_tied_parameters
from accel.weights.tensors import get_non_persistent_buffers as get_non_persistent_buffers
from accel.weights.tensors import id_tensor_storage as id_tensor_storage
from accel.weights.tensors import named_module_tensors as named_module_tensors
from accel.weights.tensors import retie_parameters as retie_parameters
from accel.weights.tensors import set_module_tensor_to_device as set_module_tensor_to_device

__all__: list[str]
