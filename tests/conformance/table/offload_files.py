"""Weights on disk, and the tensors of a model by name (documentation pages: big models)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, NoOp, P, documented

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
    documented(
        UTILS + "offload_weight",
        BACK,
        weight=REQUIRED,
        weight_name=REQUIRED,
        offload_folder=REQUIRED,
        index=None,
    ),
    documented(UTILS + "load_offloaded_weight", BACK, weight_file=REQUIRED, weight_info=REQUIRED),
    documented(UTILS + "save_offload_index", INDEX, index=REQUIRED, offload_folder=REQUIRED),
    documented(
        UTILS + "OffloadedWeightsLoader",
        MEMORY_FIRST,
        state_dict=None,
        save_folder=None,
        index=P(None, IN_PLACE),
        device=P(None, IN_PLACE),
    ),
    documented(UTILS + "OffloadedWeightsLoader.in_memory", MEMORY_FIRST, key=REQUIRED),
    documented(UTILS + "PrefixedDataset", PART, dataset=REQUIRED, prefix=REQUIRED),
    documented(
        UTILS + "extract_submodules_state_dict",
        PART,
        NoOp.FIRST,
        state_dict=REQUIRED,
        submodule_names=REQUIRED,
    ),
]
TENSORS_BY_NAME = [
    documented(
        UTILS + "named_module_tensors",
        LISTED,
        module=REQUIRED,
        include_buffers=True,
        recurse=False,
        remove_non_persistent=False,
    ),
    # Its kwargs make no difference, as the documented call shows: no mutant would.
    documented(UTILS + "find_tied_parameters", TIED, model=REQUIRED),
    documented(UTILS + "check_tied_parameters_in_config", CONFIGURED, model=REQUIRED),
    documented(
        UTILS + "check_tied_parameters_on_same_device",
        ONE_DEVICE,
        tied_params=REQUIRED,
        device_map=REQUIRED,
    ),
    documented(UTILS + "id_tensor_storage", IDENTITY, tensor=REQUIRED),
    documented(UTILS + "check_device_map", MAPPED, model=REQUIRED, device_map=REQUIRED),
    documented(
        "accel:init_on_device", ON_DEVICE, NoOp.CONTEXT, device=REQUIRED, include_buffers=None
    ),
]

ENTRIES = [*FILES, *TENSORS_BY_NAME]
