"""Models larger than memory (documentation pages: big models, hooks, modeling utilities)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented, given

EXECUTION = "test_modules_compute_on_the_execution_device"
BUFFERS = "test_dispatch.py::test_buffers_are_offloaded_on_request"
PRELOAD = "test_a_class_may_load_all_weights_within"
TURNS = "test_models_take_turns"
PLACED = "test_a_device_map_places_a_model"
STORED = "test_weights_are_stored_in_few_bits"
CAST = "test_layers_that_stand_it_are_cast"
CHANGES = "test_a_hook_changes_inputs_and_outputs"
ORDER = "test_several_hooks_run_in_their_order"
NOTHING = "test_a_hook_that_does_nothing"
REMOVED = "test_hooks_of_submodules_are_removed"
ATTACHED = "test_attach_hooks.py::test_buffers_are_offloaded_on_request"
PART = "test_a_part_has_a_name_in_the_mappings"
WITHIN = "test_a_class_loads_all_weights_within"
OWN = "test_every_module_offloads_its_own_weights"
BLOCKS = "test_some_blocks_are_offloaded"
TIED = "test_tied_copies_are_handed_on"
ALONE = "test_weights_are_there_for_the_forward_pass_alone"
MOVED = "test_inputs_and_weights_go_to_the_device"
SPREAD = "test_a_checkpoint_is_loaded_and_spread"
DECIDES = "test_memory_classes_and_dtype_decide"
OPTIONS = "test_hooks_have_the_options"
PROCESSES = "test_options_of_several_processes_are_handed_on"
FILLED = "test_devices_are_filled_in_order"
DTYPE = "test_a_dtype_lets_more_fit"
BALANCED = "test_layers_are_balanced"
HALF = "test_a_dtype_balances_fewer_bytes"
LARGEST = "test_the_largest_layer"
A_WHILE = "test_a_module_is_on_a_device_for_a_while"
INTO_MODEL = "test_offloaded_weights_are_loaded_into_a_model"
TO_FOLDER = "test_a_state_dict_goes_to_a_folder"
A_VALUE = "test_a_value_is_taken_without_a_copy"
RETIED = "test_parameters_are_tied_again"


def members(kind: str, tests: dict[str, str], noops: dict[str, NoOp]) -> list[Entry]:
    """Return the rows of the documented callbacks of a hook."""
    return [
        Entry(f"accel.hooks:{kind}.{name}", test, noops.get(name, NoOp.NONE))
        for name, test in tests.items()
    ]


MODELING = [
    documented(
        "accel.big_modeling:attach_layerwise_casting_hooks",
        CAST,
        module=REQUIRED,
        storage_dtype=REQUIRED,
        compute_dtype=REQUIRED,
        skip_modules_pattern=P(None, "test_modules_are_spared_by_name"),
        skip_modules_classes=P(None, "test_modules_are_spared_by_class"),
        non_blocking=P(False, "test_conversions_may_overlap"),
    ),
    documented(
        "accel.big_modeling:cpu_offload",
        "test_weights_stay_in_memory",
        NoOp.FIRST,
        model=REQUIRED,
        execution_device=P(None, EXECUTION),
        offload_buffers=P(False, BUFFERS),
        state_dict=P(None, "test_a_state_dict_may_be_given"),
        preload_module_classes=P(None, PRELOAD),
    ),
    documented(
        "accel.big_modeling:cpu_offload_with_hook",
        TURNS,
        model=REQUIRED,
        execution_device=None,
        prev_module_hook=None,
    ),
    documented(
        "accel.big_modeling:disk_offload",
        "test_weights_lie_on_disk",
        NoOp.FIRST,
        model=REQUIRED,
        offload_dir=REQUIRED,
        execution_device=P(None, EXECUTION),
        offload_buffers=P(False, BUFFERS),
        preload_module_classes=P(None, PRELOAD),
    ),
    documented(
        "accel.big_modeling:dispatch_model",
        PLACED,
        NoOp.FIRST,
        model=REQUIRED,
        device_map=REQUIRED,
        main_device=P(None, "test_offloaded_modules_run_on_the_main_device"),
        state_dict=P(None, "test_weights_in_memory_may_be_given"),
        offload_dir=None,
        offload_index=P(None, "test_an_index_may_be_given"),
        offload_buffers=P(False, "test_buffers_of_a_map_are_offloaded_on_request"),
        skip_keys=P(None, "test_dispatch.py::test_some_arguments_stay"),
        preload_module_classes=P(None, "test_a_class_of_a_map_may_load_all_weights_within"),
        force_hooks=P(False, "test_one_device_needs_no_hooks_unless_they_are_forced"),
    ),
    documented(
        "accel.big_modeling:init_empty_weights",
        "test_parameters_have_no_memory",
        NoOp.CONTEXT,
        include_buffers=P(None, "test_buffers_stay_unless_they_are_included"),
    ),
    Entry(
        "accel.big_modeling:load_checkpoint_and_dispatch",
        SPREAD,
        NoOp.FIRST,
        {
            **given(SPREAD, model=REQUIRED, checkpoint=REQUIRED, device_map=None),
            **given(DECIDES, max_memory=None, no_split_module_classes=None),
            "offload_folder": P(None, SPREAD),
            "offload_buffers": P(False, "test_load.py::test_buffers_are_offloaded_on_request"),
            "dtype": P(None, DECIDES),
            "offload_state_dict": P(None, "test_load.py::test_legacy_files_may_be_mapped"),
            **given(OPTIONS, skip_keys=None, preload_module_classes=None, force_hooks=False),
            "strict": P(False, "test_load.py::test_names_must_match_if_strict"),
            **given(PROCESSES, full_state_dict=True, broadcast_from_rank0=False),
        },
        choices={
            "device_map": {
                word: f"test_a_map_may_be_inferred[{word}]"
                for word in ("auto", "balanced", "balanced_low_0", "sequential")
            }
        },
    ),
]
HOOK_CLASSES = [
    documented(
        "accel.hooks:AlignDevicesHook",
        MOVED,
        execution_device=None,
        offload=P(False, ALONE),
        io_same_device=P(False, "test_outputs_may_go_to_the_device_of_the_inputs"),
        weights_map=P(None, "test_weights_may_come_from_a_mapping"),
        offload_buffers=P(False, "test_buffers_stay_unless_they_are_offloaded"),
        place_submodules=P(False, "test_weights_of_submodules_may_be_included"),
        skip_keys=P(None, "test_offload.py::test_some_arguments_stay"),
        tied_params_map=P(None, "test_copies_of_tied_weights_are_shared"),
    ),
    *members(
        "AlignDevicesHook",
        {"init_hook": MOVED, "pre_forward": MOVED, "post_forward": ALONE, "detach_hook": ALONE},
        {"init_hook": NoOp.FIRST, "detach_hook": NoOp.FIRST},
    ),
    documented(
        "accel.hooks:LayerwiseCastingHook",
        STORED,
        storage_dtype=REQUIRED,
        compute_dtype=REQUIRED,
        non_blocking=P(REQUIRED, "test_conversions_may_overlap"),
    ),
    *members(
        "LayerwiseCastingHook",
        dict.fromkeys(("init_hook", "pre_forward", "post_forward", "detach_hook"), STORED),
        {"init_hook": NoOp.FIRST, "detach_hook": NoOp.FIRST},
    ),
    Entry(
        "accel.hooks:ModelHook",
        attributes={"no_grad": "test_a_forward_pass_may_compute_no_gradients"},
        call=False,
    ),
    *members(
        "ModelHook",
        dict.fromkeys(("init_hook", "pre_forward", "post_forward", "detach_hook"), NOTHING),
        {},
    ),
    documented("accel.hooks:SequentialHook", ORDER, hooks=REQUIRED),
    *members(
        "SequentialHook",
        dict.fromkeys(("init_hook", "pre_forward", "post_forward", "detach_hook"), ORDER),
        {"init_hook": NoOp.FIRST, "detach_hook": NoOp.FIRST},
    ),
]
HOOK_FUNCTIONS = [
    documented(
        "accel.hooks:add_hook_to_module",
        CHANGES,
        NoOp.FIRST,
        module=REQUIRED,
        hook=REQUIRED,
        append=P(False, "test_a_hook_is_replaced_or_appended_to"),
    ),
    documented(
        "accel.hooks:attach_align_device_hook",
        OWN,
        module=REQUIRED,
        execution_device=P(None, "test_modules_run_on_the_execution_device"),
        offload=False,
        weights_map=P(None, f"{PART}[attach_align_device_hook-cpu-True]"),
        offload_buffers=P(False, f"{ATTACHED}[attach_align_device_hook]"),
        module_name=P("", f"{PART}[attach_align_device_hook-cpu-True]"),
        skip_keys=P(None, "test_skipped_keys_stay[attach_align_device_hook]"),
        preload_module_classes=P(None, f"{WITHIN}[attach_align_device_hook]"),
        tied_params_map=P(None, TIED),
    ),
    documented(
        "accel.hooks:attach_align_device_hook_on_blocks",
        BLOCKS,
        module=REQUIRED,
        execution_device=P(None, "test_blocks_run_where_the_mapping_says"),
        offload=False,
        weights_map=None,
        offload_buffers=P(False, f"{ATTACHED}[attach_align_device_hook_on_blocks]"),
        module_name=P("", f"{PART}[attach_align_device_hook_on_blocks-device1-offload1]"),
        skip_keys=P(None, "test_skipped_keys_stay[attach_align_device_hook_on_blocks]"),
        preload_module_classes=P(None, f"{WITHIN}[attach_align_device_hook_on_blocks]"),
        tied_params_map=P(None, TIED),
    ),
    documented(
        "accel.hooks:attach_execution_device_hook",
        "test_every_module_runs_on_the_device",
        module=REQUIRED,
        execution_device=REQUIRED,
        skip_keys=P(None, "test_skipped_keys_stay[attach_execution_device_hook]"),
        preload_module_classes=P(None, "test_nothing_is_attached_within_some_classes"),
        tied_params_map=P(None, TIED),
    ),
    documented(
        "accel.hooks:remove_hook_from_module",
        CHANGES,
        NoOp.FIRST,
        module=REQUIRED,
        recurse=P(False, REMOVED),
    ),
    documented("accel.hooks:remove_hook_from_submodules", REMOVED, module=REQUIRED),
]
INFERENCE = [
    Entry(
        "accel.inference:prepare_pippy",
        "test_outputs_are_those_of_the_model[2]",
        NoOp.FIRST,
        {
            "model": P(REQUIRED, "test_one_process_has_one_stage"),
            **{
                name: P(default, "test_options")
                for name, default in {
                    "split_points": "auto",
                    "no_split_module_classes": None,
                    "example_args": (),
                    "example_kwargs": None,
                    "num_chunks": None,
                    "gather_output": False,
                }.items()
            },
        },
    ),
]
QUANTIZATION = [
    documented(
        "accel.utils:load_and_quantize_model",
        "test_a_word_places_a_model",
        NoOp.FIRST,
        model=REQUIRED,
        bnb_quantization_config=REQUIRED,
        weights_location=P(None, "test_quantize.py::test_tied_weights_stay_tied"),
        device_map=P(None, "test_a_map_is_made_of_quantized_sizes"),
        no_split_module_classes=P(None, "test_a_map_is_made_of_quantized_sizes"),
        max_memory=P(None, "test_a_map_is_made_of_quantized_sizes"),
        offload_folder=P(None, "test_offloaded_layers_of_4_bits_are_kept"),
        offload_state_dict=P(False, "test_quantize.py::test_legacy_files_may_be_mapped"),
    ),
    Entry(
        "accel.utils:BnbQuantizationConfig",
        "test_a_word_places_a_model",
        parameters={
            **given(
                "test_settings_reach_the_layers",
                load_in_8bit=False,
                llm_int8_threshold=6.0,
                load_in_4bit=False,
                bnb_4bit_quant_type="fp4",
                bnb_4bit_use_double_quant=False,
                bnb_4bit_compute_dtype="fp16",
            ),
            "torch_dtype": P(None, "test_other_weights_have_the_dtype"),
            "skip_modules": P(None, "test_settings_reach_the_layers"),
            "keep_in_fp32_modules": P(None, "test_other_weights_have_the_dtype"),
        },
        choices={
            "bnb_4bit_quant_type": dict.fromkeys(("fp4", "nf4"), "test_settings_reach_the_layers"),
            "bnb_4bit_compute_dtype": {
                "fp32": "test_dtypes_have_several_names",
                "fp16": "test_settings_reach_the_layers",
                "bf16": "test_settings_reach_the_layers",
            },
        },
    ),
]
UTILITIES = [
    documented(
        "accel.utils:align_module_device",
        A_WHILE,
        NoOp.CONTEXT,
        module=REQUIRED,
        execution_device=None,
    ),
    documented(
        "accel.utils:calculate_maximum_sizes", "test_a_model_and_its_largest_layer", model=REQUIRED
    ),
    documented(
        "accel.utils:compute_module_sizes",
        "test_bytes_by_name",
        model=REQUIRED,
        dtype=P(None, "test_a_dtype_makes_tensors_smaller_only"),
        special_dtypes=P(None, "test_some_tensors_have_a_dtype_of_their_own"),
        buffers_only=P(False, "test_buffers_alone"),
    ),
    documented(
        "accel.utils:get_balanced_memory",
        BALANCED,
        model=REQUIRED,
        max_memory=None,
        no_split_module_classes=P(None, "test_blocks_need_more_room_than_layers"),
        dtype=P(None, HALF),
        special_dtypes=P(None, HALF),
        low_zero=P(False, "test_the_first_device_may_get_little"),
    ),
    documented(
        "accel.utils:get_max_layer_size",
        LARGEST,
        modules=REQUIRED,
        module_sizes=REQUIRED,
        no_split_module_classes=REQUIRED,
    ),
    documented(
        "accel.utils:has_offloaded_params", "test_offloaded_parameters_are_noticed", module=REQUIRED
    ),
    documented(
        "accel.utils:infer_auto_device_map",
        FILLED,
        model=REQUIRED,
        max_memory=None,
        no_split_module_classes=P(None, "test_blocks_are_not_split"),
        dtype=P(None, DTYPE),
        special_dtypes=P(None, DTYPE),
        verbose=P(False, "test_decisions_are_logged_on_request"),
        clean_result=P(True, "test_entries_stay_apart_on_request"),
        offload_buffers=P(False, "test_buffers_of_offloaded_modules_need_room"),
        fallback_allocation=P(False, "test_a_later_module_is_tried_on_request"),
    ),
    documented(
        "accel.utils:load_offloaded_weights",
        INTO_MODEL,
        model=REQUIRED,
        index=REQUIRED,
        offload_folder=REQUIRED,
    ),
    documented(
        "accel.utils:load_state_dict",
        "test_one_file_is_read",
        checkpoint_file=REQUIRED,
        device_map=P(None, "test_weights_of_a_file_are_placed"),
    ),
    documented("accel.utils:offload_state_dict", TO_FOLDER, save_dir=REQUIRED, state_dict=REQUIRED),
    documented("accel.utils:retie_parameters", RETIED, model=REQUIRED, tied_params=REQUIRED),
    documented(
        "accel.utils:set_module_tensor_to_device",
        "test_a_tensor_is_placed",
        module=REQUIRED,
        tensor_name=REQUIRED,
        device=REQUIRED,
        value=P(None, A_VALUE),
        dtype=P(None, "test_the_dtype_is_that_of_the_module_or_the_one_given"),
        fp16_statistics=P(None, "test_scales_of_8_bit_weights_are_kept"),
        tied_params_map=P(None, "test_copies_of_tied_weights_are_reused"),
        non_blocking=P(False, "test_a_copy_may_overlap_with_computation"),
        clear_cache=P(True, "test_cached_memory_is_given_back_on_request"),
    ),
]
ENTRIES = [*MODELING, *HOOK_CLASSES, *HOOK_FUNCTIONS, *INFERENCE, *QUANTIZATION, *UTILITIES]
