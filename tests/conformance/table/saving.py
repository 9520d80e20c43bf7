"""Saving and loading (documentation pages: accelerator, utilities, large models)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, P, required

LOADING = "tests/accel/checkpoint/test_load.py::test_"
API = "tests/accel/checkpoint/test_save.py::test_"
WEIGHTS = "tests/accel/weights/test_load_weights.py::test_"
PROCESSES = "tests/accel/checkpoint/test_processes.py::test_"

SAVED = API + "an_object_is_saved"
SAVED_BY_FUNCTION = API + "the_function_saves_an_object"
EXPORTED = API + "a_model_is_exported"
STATE_DICT = API + "a_state_dict_has_the_users_own_names"
STATE = API + "a_state_is_saved_where_it_is_said"
LOADED = LOADING + "a_state_is_loaded_from_where_it_is_said"
READING = LOADING + "how_files_are_read"
UNKNOWN = API + "arguments_of_no_backend_are_refused"
REGISTERED = LOADING + "registered_objects_come_back_and_others_do_not"
SAVE_HOOK = API + "a_hook_before_saving_takes_weights_over"
LOAD_HOOK = LOADING + "a_hook_before_loading_takes_models_over"
FIELDS = API + "the_fields_of_a_project"
NEXT = API + "the_number_of_the_next_one"
NODES = PROCESSES + "each_node_has_a_state_of_its_own"
DISK = WEIGHTS + "buffers_are_offloaded_on_request"
REFUSED = WEIGHTS + "other_options_are_refused"

NATIVE = (
    "tests/accel/strategies/deepspeed/test_universal.py::"
    "test_what_the_format_has_no_place_for_is_refused"
)

ENTRIES = [
    Entry(
        "accel:Accelerator.save_native",
        NATIVE,
        parameters=required(NATIVE, "model", "save_directory"),
    ),
    Entry(
        "accel:Accelerator.load_native",
        NATIVE,
        parameters={
            "model": P(REQUIRED, NATIVE),
            "input_dir": P(REQUIRED, NATIVE),
            "trust_pickle": P(False, NATIVE),
        },
    ),
    Entry(
        "accel:Accelerator.save",
        SAVED,
        parameters={
            "obj": P(REQUIRED, SAVED),
            "f": P(REQUIRED, SAVED),
            "safe_serialization": P(False, API + "an_object_is_saved_as_safetensors"),
        },
    ),
    Entry(
        "accel:Accelerator.save_model",
        EXPORTED,
        parameters={
            "model": P(REQUIRED, EXPORTED),
            "save_directory": P(REQUIRED, EXPORTED),
            "max_shard_size": P("10GB", API + "an_export_is_split_into_shards"),
            "safe_serialization": P(True, API + "an_export_may_be_what_torch_saves"),
        },
    ),
    Entry(
        "accel:Accelerator.get_state_dict",
        STATE_DICT,
        parameters={
            "model": P(REQUIRED, STATE_DICT),
            "unwrap": P(True, API + "a_state_dict_may_keep_the_wrappers_names"),
        },
    ),
    Entry(
        "accel:Accelerator.save_state",
        STATE,
        parameters={
            "output_dir": P(None, STATE),
            "safe_serialization": P(True, API + "a_state_may_hold_weights_as_torch_saves_them"),
            "save_model_func_kwargs": P({}, UNKNOWN, keyword=True),
        },
    ),
    Entry(
        "accel:Accelerator.load_state",
        LOADED,
        parameters={
            "input_dir": P(None, LOADED),
            "load_kwargs": P(None, READING),
            "strict": P(True, LOADING + "weights_may_fit_in_part", keyword=True),
            "map_location": P(None, READING, keyword=True),
            "load_model_func_kwargs": P({}, UNKNOWN, keyword=True),
        },
    ),
    Entry(
        "accel:Accelerator.register_for_checkpointing",
        REGISTERED,
        parameters={"objects": P(REQUIRED, REGISTERED)},
    ),
    Entry(
        "accel:Accelerator.register_save_state_pre_hook",
        SAVE_HOOK,
        parameters={"hook": P(REQUIRED, SAVE_HOOK)},
    ),
    Entry(
        "accel:Accelerator.register_load_state_pre_hook",
        LOAD_HOOK,
        parameters={"hook": P(REQUIRED, LOAD_HOOK)},
    ),
    Entry("accel:Accelerator", attributes={"save_iteration": NEXT}, call=False),
    Entry(
        "accel.utils:save",
        SAVED_BY_FUNCTION,
        parameters={
            "obj": P(REQUIRED, SAVED_BY_FUNCTION),
            "f": P(REQUIRED, SAVED_BY_FUNCTION),
            "save_on_each_node": P(False, NODES),
            "safe_serialization": P(False, API + "the_function_saves_safetensors"),
        },
    ),
    Entry(
        "accel:load_checkpoint_in_model",
        WEIGHTS + "weights_are_loaded",
        parameters={
            "model": P(REQUIRED, WEIGHTS + "weights_are_loaded"),
            "checkpoint": P(
                REQUIRED, WEIGHTS + "a_checkpoint_is_looked_for_where_it_is_said_to_be"
            ),
            "device_map": P(None, WEIGHTS + "a_device_map_places_submodules"),
            "offload_folder": P(None, DISK),
            "dtype": P(None, WEIGHTS + "weights_become_the_dtype"),
            "offload_state_dict": P(False, WEIGHTS + "legacy_files_may_be_mapped"),
            "offload_buffers": P(False, DISK),
            "keep_in_fp32_modules": P(None, WEIGHTS + "some_modules_stay_in_fp32"),
            "offload_8bit_bnb": P(False, REFUSED),
            "strict": P(False, WEIGHTS + "names_must_match_if_strict"),
            "full_state_dict": P(True, REFUSED),
            "broadcast_from_rank0": P(False, PROCESSES + "rank_0_reads_weights_for_all[2]"),
        },
    ),
    Entry(
        "accel.utils:ProjectConfiguration",
        FIELDS,
        parameters={
            "project_dir": P(None, API + "the_folder_of_a_project"),
            "logging_dir": P(None, API + "the_folder_of_logs"),
            "automatic_checkpoint_naming": P(False, API + "automatic_names"),
            "total_limit": P(None, API + "only_so_many_are_kept"),
            "iteration": P(0, NEXT),
            "save_on_each_node": P(False, NODES),
        },
        attributes={
            "project_dir": FIELDS,
            "logging_dir": FIELDS,
            "automatic_checkpoint_naming": FIELDS,
            "total_limit": FIELDS,
            "iteration": FIELDS,
            "save_on_each_node": FIELDS,
        },
    ),
    Entry(
        "accel.utils:ProjectConfiguration.set_directories",
        API + "the_folders_of_a_project_may_be_set_later",
        parameters={
            "project_dir": P(None, API + "the_folders_of_a_project_may_be_set_later"),
        },
    ),
]
