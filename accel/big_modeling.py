"""Models larger than memory, at the documented path: re-exports."""

from __future__ import annotations

from accel.weights.device_hooks import (
    attach_layerwise_casting_hooks,
)
from accel.weights.device_map import (
    check_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from accel.weights.dispatch import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
)
from accel.weights.folder import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
)
from accel.weights.load import (
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_state_dict,
)
from accel.weights.tensors import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    init_empty_weights,
    init_on_device,
    retie_parameters,
)

__all__ = [
    "OffloadedWeightsLoader",
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "extract_submodules_state_dict",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_state_dict",
    "offload_state_dict",
    "retie_parameters",
]
