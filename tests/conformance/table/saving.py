"""Saving and loading (documentation pages: accelerator, utilities, large models)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, P, documented

SAVED = "test_an_object_is_saved"
SAVED_BY_FUNCTION = "test_the_function_saves_an_object"
EXPORTED = "test_a_model_is_exported"
STATE_DICT = "test_a_state_dict_has_the_users_own_names"
STATE = "test_a_state_is_saved_where_it_is_said"
LOADED = "test_a_state_is_loaded_from_where_it_is_said"
READING = "test_how_files_are_read"
UNKNOWN = "test_arguments_of_no_backend_are_refused"
REGISTERED = "test_registered_objects_come_back_and_others_do_not"
SAVE_HOOK = "test_a_hook_before_saving_takes_weights_over"
LOAD_HOOK = "test_a_hook_before_loading_takes_models_over"
FIELDS = "test_the_fields_of_a_project"
NEXT = "test_the_number_of_the_next_one"
NODES = "test_each_node_has_a_state_of_its_own"
LAYOUT = "test_every_layout_loads_strictly[cpu-folder]"
DISK = "test_load.py::test_buffers_are_offloaded_on_request_in_memory"
REFUSED = "test_other_options_are_refused"

ENTRIES = [
    documented(
        "accel:Accelerator.save",
        SAVED,
        obj=REQUIRED,
        f=REQUIRED,
        safe_serialization=P(False, "test_an_object_is_saved_as_safetensors"),
    ),
    documented(
        "accel:Accelerator.save_model",
        EXPORTED,
        model=REQUIRED,
        save_directory=REQUIRED,
        max_shard_size=P("10GB", "test_an_export_is_split_into_shards"),
        safe_serialization=P(True, "test_an_export_may_be_what_torch_saves"),
    ),
    documented(
        "accel:Accelerator.get_state_dict",
        STATE_DICT,
        model=REQUIRED,
        unwrap=P(True, "test_a_state_dict_may_keep_the_wrappers_names"),
    ),
    documented(
        "accel:Accelerator.save_state",
        STATE,
        output_dir=None,
        safe_serialization=P(True, "test_a_state_may_hold_weights_as_torch_saves_them"),
        save_model_func_kwargs=P({}, UNKNOWN, keyword=True),
    ),
    documented(
        "accel:Accelerator.load_state",
        LOADED,
        input_dir=None,
        load_kwargs=P(None, READING),
        strict=P(True, "test_weights_may_fit_in_part", keyword=True),
        map_location=P(None, READING, keyword=True),
        load_model_func_kwargs=P({}, UNKNOWN, keyword=True),
    ),
    documented("accel:Accelerator.register_for_checkpointing", REGISTERED, objects=REQUIRED),
    documented("accel:Accelerator.register_save_state_pre_hook", SAVE_HOOK, hook=REQUIRED),
    documented("accel:Accelerator.register_load_state_pre_hook", LOAD_HOOK, hook=REQUIRED),
    Entry("accel:Accelerator", attributes={"save_iteration": NEXT}, call=False),
    documented(
        "accel.utils:save",
        SAVED_BY_FUNCTION,
        obj=REQUIRED,
        f=REQUIRED,
        save_on_each_node=P(False, NODES),
        safe_serialization=P(False, "test_the_function_saves_safetensors"),
    ),
    documented(
        "accel:load_checkpoint_in_model",
        LAYOUT,
        model=REQUIRED,
        checkpoint=REQUIRED,
        device_map=P(None, "test_a_device_map_places_submodules"),
        offload_folder=P(None, DISK),
        dtype=P(None, "test_weights_become_the_dtype"),
        offload_state_dict=P(False, "test_load.py::test_legacy_files_may_be_mapped_in_memory"),
        offload_buffers=P(False, DISK),
        keep_in_fp32_modules=P(None, "test_some_modules_stay_in_fp32"),
        offload_8bit_bnb=P(False, REFUSED),
        strict=P(False, "test_load.py::test_names_must_match_if_strict_in_memory"),
        full_state_dict=P(True, REFUSED),
        broadcast_from_rank0=P(False, "test_rank_0_reads_weights_for_all[2]"),
    ),
    Entry(
        "accel.utils:ProjectConfiguration",
        FIELDS,
        parameters={
            "project_dir": P(None, FIELDS),
            "logging_dir": P(None, FIELDS),
            "automatic_checkpoint_naming": P(False, "test_automatic_names"),
            "total_limit": P(None, "test_only_so_many_are_kept"),
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
    documented(
        "accel.utils:ProjectConfiguration.set_directories",
        "test_the_folders_of_a_project_may_be_set_later",
        project_dir=None,
    ),
]
