"""Weights on disk, and the tensors of a model by name (documentation pages: big models)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, required

BACK = "test_a_weight_comes_back_bit_for_bit"
INDEX = "test_an_index_is_added_to_if_there_is_one"
MEMORY_FIRST = "test_memory_comes_before_disk"
IN_PLACE = "test_safetensors_are_read_in_place"
PART = "test_a_part_of_a_mapping"
LISTED = "test_tensors_are_listed"
TIED = "test_tied_parameters_are_found"
ONE_DEVICE = "test_tied_parameters_belong_on_one_device"
CONFIGURED = "test_a_configuration_says_whether_embeddings_are_tied"
IDENTITY = "test_memory_has_an_identity"
MAPPED = "test_every_weight_needs_a_device"
ON_DEVICE = "test_any_device_will_do"
UTILS = "accel.utils:"


FILES = [
    Entry(
        UTILS + "offload_weight",
        BACK,
        parameters={
            **required(BACK, "weight", "weight_name", "offload_folder"),
            "index": P(None, BACK),
        },
    ),
    Entry(
        UTILS + "load_offloaded_weight",
        BACK,
        parameters=required(BACK, "weight_file", "weight_info"),
    ),
    Entry(
        UTILS + "save_offload_index", INDEX, parameters=required(INDEX, "index", "offload_folder")
    ),
    Entry(
        UTILS + "OffloadedWeightsLoader",
        MEMORY_FIRST,
        parameters={
            "state_dict": P(None, MEMORY_FIRST),
            "save_folder": P(None, MEMORY_FIRST),
            "index": P(None, IN_PLACE),
            "device": P(None, IN_PLACE),
        },
    ),
    Entry(
        UTILS + "OffloadedWeightsLoader.in_memory",
        MEMORY_FIRST,
        parameters=required(MEMORY_FIRST, "key"),
    ),
    Entry(UTILS + "PrefixedDataset", PART, parameters=required(PART, "dataset", "prefix")),
    Entry(
        UTILS + "extract_submodules_state_dict",
        PART,
        NoOp.FIRST,
        required(PART, "state_dict", "submodule_names"),
    ),
]
TENSORS_BY_NAME = [
    Entry(
        UTILS + "named_module_tensors",
        LISTED,
        parameters={
            "module": P(REQUIRED, LISTED),
            "include_buffers": P(True, LISTED),
            "recurse": P(False, LISTED),
            "remove_non_persistent": P(False, LISTED),
        },
    ),
    # Its kwargs make no difference, as the documented call shows: no mutant would.
    Entry(UTILS + "find_tied_parameters", TIED, parameters=required(TIED, "model")),
    Entry(
        UTILS + "check_tied_parameters_in_config",
        CONFIGURED,
        parameters=required(CONFIGURED, "model"),
    ),
    Entry(
        UTILS + "check_tied_parameters_on_same_device",
        ONE_DEVICE,
        parameters=required(ONE_DEVICE, "tied_params", "device_map"),
    ),
    Entry(UTILS + "id_tensor_storage", IDENTITY, parameters=required(IDENTITY, "tensor")),
    Entry(UTILS + "check_device_map", MAPPED, parameters=required(MAPPED, "model", "device_map")),
    Entry(
        "accel:init_on_device",
        ON_DEVICE,
        NoOp.CONTEXT,
        {"device": P(REQUIRED, ON_DEVICE), "include_buffers": P(None, ON_DEVICE)},
    ),
]

ENTRIES = [*FILES, *TENSORS_BY_NAME]
