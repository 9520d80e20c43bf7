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
_FIELDS = """
tp_degree pp_degree use_custom_fsdp overlap_cpu_optimizer_d2h_h2d no_load_optim eod_mask_loss
no_save_optim optimizer_cpu_offload use_precision_aware_optimizer
decoder_last_pipeline_num_layers recompute_granularity recompute_method recompute_num_layers
attention_backend expert_model_parallel_size context_parallel_size attention_dropout
hidden_dropout attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss
use_rotary_position_embeddings num_micro_batches gradient_clipping sequence_parallelism
recompute_activations use_distributed_optimizer pipeline_model_parallel_split_rank
num_layers_per_virtual_pipeline_stage is_train_batch_min train_iters train_samples
weight_decay_incr_style start_weight_decay end_weight_decay lr_decay_style lr_decay_iters
lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction min_lr consumed_samples
no_wd_decay_cond scale_lr_cond lr_mult megatron_dataset_flag seq_length encoder_seq_length
decoder_seq_length tensorboard_dir set_all_logging_options eval_iters eval_interval
return_logits custom_train_step_class custom_train_step_kwargs custom_model_provider_function
custom_prepare_model_function custom_megatron_datasets_provider_function
custom_get_batch_function custom_loss_function other_megatron_args
"""
_BUILT = {
    **dict.fromkeys(
        ("tp_degree", "pp_degree", "use_distributed_optimizer"),
        "test_ranks_are_laid_out_as_megatron_does",
    ),
    **dict.fromkeys(
        ("recompute_granularity", "recompute_method", "sequence_parallelism"),
        "test_values_of_the_plugin_are_checked",
    ),
    **dict.fromkeys(
        (
            *("recompute_num_layers", "recompute_activations", "attention_dropout"),
            *("hidden_dropout", "other_megatron_args", "gradient_clipping"),
        ),
        "test_fields_reach_the_configuration_of_megatron",
    ),
    **dict.fromkeys(
        ("attention_softmax_in_fp32", "seq_length", "is_train_batch_min"),
        "test_the_global_batch_counts_data_parallel_ranks_and_micro_batches",
    ),
    **dict.fromkeys(
        (
            *("custom_train_step_class", "custom_train_step_kwargs", "megatron_dataset_flag"),
            *("custom_get_batch_function", "custom_loss_function"),
        ),
        "test_a_step_of_ones_own_computes_the_loss",
    ),
    **dict.fromkeys(
        ("lr_decay_style", "lr_decay_iters", "min_lr"), "test_the_schedule_is_that_of_megatron"
    ),
    **dict.fromkeys(
        (
            *("train_iters", "eval_iters", "eval_interval"),
            "custom_megatron_datasets_provider_function",
        ),
        "test_loaders_of_megatrons_data_sets_are_built",
    ),
    "num_micro_batches": "test_micro_batches_are_accumulated",
    "custom_model_provider_function": "test_a_module_of_megatron_trains_as_it_is[True]",
}
_DEFAULTS = {
    **{"is_train_batch_min": True, "weight_decay_incr_style": "constant", "min_lr": 0},
    **{"lr_decay_style": "linear", "lr_mult": 1.0, "megatron_dataset_flag": False},
    **{"set_all_logging_options": False, "eval_iters": 100, "eval_interval": 1000},
    "return_logits": False,
}
MEGATRON = {
    name: P(
        _DEFAULTS.get(name),
        _BUILT.get(name, f"test_what_is_not_built_is_refused_by_name[{name}]"),
    )
    for name in _FIELDS.split()
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
            ("MegatronLMPlugin", MEGATRON["tp_degree"].test, MEGATRON),
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
