"""Methods of plugins and handlers of the current release."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, P, documented, given

POLICY = "test_a_policy_becomes_a_function_with_the_same_units[fields0]"
PRECISION = "test_a_precision_becomes_a_policy"
KIND = "test_the_kind_of_state_dict_is_set"
OFFLOAD = "test_offloading_becomes_a_policy"
ALL = "test_every_auto_value_is_filled"
SECTION = "test_a_section_of_the_configuration_is_filled"
ONE = "test_one_value_is_filled_or_compared"
WRITTEN = "test_a_precision_is_written_into_the_configuration[config0-bf16-None-True]"
SEEN = "test_transformers_reads_a_configuration_without_open_values"
LEAVES = "test_leaf_modules_are_named_to_deepspeed"
HOOK = "test_a_communication_hook_is_registered_by_hand"
HELD = "test_fields_show_what_holds_and_count_as_not_given"
SHOWN = "test_fields_that_nobody_gave_show_what_holds"
OUTLINE = "test_the_outline_of_a_configuration_reaches_no_engine"
DYNAMO = {
    "backend": P(None, "test_a_backend_is_named_in_any_case"),
    "mode": P(None, "test_wrong_values_are_named"),
    "fullgraph": P(None, "test_graph_breaks_are_errors_on_request"),
    "dynamic": P(None, "test_shapes_are_symbolic_on_request"),
    "options": P(None, "test_wrong_values_are_named"),
    "disable": P(False, "test_what_is_off_or_compiled_is_left_as_it_is"),
    "use_regional_compilation": P(None, "test_a_model_without_repeated_layers_is_compiled_whole"),
}
TENSOR_PARALLEL = {
    "tp_size": P(1, "test_wrong_values_are_named"),
    "torch_device_mesh": P(None, "test_the_size_is_that_of_the_mesh"),
    "tp_plan": P(None, "test_wrong_values_are_named"),
}
FSDP = "accel:FullyShardedDataParallelPlugin."
DEEPSPEED = "accel:DeepSpeedPlugin."

ENTRIES = [
    Entry(
        FSDP.rstrip("."),
        attributes=dict.fromkeys(
            (
                *("reshard_after_forward", "cpu_offload", "state_dict_type"),
                *("activation_checkpointing", "activation_checkpointing_offload"),
                "cpu_ram_efficient_loading",
            ),
            HELD,
        )
        | dict.fromkeys(("state_dict_config", "optim_state_dict_config"), KIND),
        call=False,
    ),
    Entry(
        DEEPSPEED.rstrip("."),
        attributes={
            **dict.fromkeys(
                (
                    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage"),
                    *("is_train_batch_min", "offload_optimizer_device", "offload_param_device"),
                    *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
                    *("zero3_init_flag", "zero3_save_16bit_model", "enable_msamp"),
                    "msamp_opt_level",
                ),
                SHOWN,
            ),
            "deepspeed_config": OUTLINE,
        },
        call=False,
    ),
    *(
        Entry(
            f"accel:{name}",
            test,
            parameters=parameters,
            attributes={field: parameter.test for field, parameter in parameters.items()},
        )
        for name, test, parameters in (
            ("TorchDynamoPlugin", DYNAMO["backend"].test, DYNAMO),
            (
                "TorchTensorParallelPlugin",
                TENSOR_PARALLEL["torch_device_mesh"].test,
                TENSOR_PARALLEL,
            ),
        )
    ),
    documented(FSDP + "set_auto_wrap_policy", POLICY, model=REQUIRED),
    documented(
        FSDP + "set_mixed_precision",
        PRECISION,
        mixed_precision=REQUIRED,
        buffer_autocast=False,
        override=False,
    ),
    documented(FSDP + "set_state_dict_type", KIND, state_dict_type=None),
    Entry(FSDP + "set_cpu_offload", OFFLOAD),
    Entry(FSDP + "validate_cpu_offload", OFFLOAD),
    Entry(FSDP + "validate_mixed_precision_policy", "test_an_assigned_policy_is_checked"),
    documented(
        DEEPSPEED + "deepspeed_config_process",
        ALL,
        prefix=P("", SECTION),
        mismatches=None,
        config=P(None, SECTION),
        must_match=True,
        kwargs=P(REQUIRED, ALL, keyword=True),
    ),
    documented(
        DEEPSPEED + "fill_match",
        ONE,
        ds_key_long=REQUIRED,
        mismatches=None,
        must_match=True,
        kwargs=P(REQUIRED, ONE, keyword=True),
    ),
    documented(DEEPSPEED + "set_mixed_precision", WRITTEN, mixed_precision=REQUIRED),
    Entry(DEEPSPEED + "set_deepspeed_weakref", SEEN),
    documented(DEEPSPEED + "set_moe_leaf_modules", LEAVES, model=REQUIRED),
    documented("accel:DistributedDataParallelKwargs.register_comm_hook", HOOK, model=REQUIRED),
    Entry(
        "accel:KwargsHandler.to_dict",
        parameters=given("test_fields_are_skipped_by_name", ignore_keys=()),
        call=False,
    ),
]
