# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.weights.folder import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel.weights.folder import PrefixedDataset as PrefixedDataset
from accel.weights.folder import extract_submodules_state_dict as extract_submodules_state_dict
from accel.weights.folder import load_offloaded_weight as load_offloaded_weight
from accel.weights.folder import offload_state_dict as offload_state_dict
from accel.weights.folder import offload_weight as offload_weight
from accel.weights.folder import save_offload_index as save_offload_index

__all__: list[str]
