"""What a run was asked for and shows: the current release's attributes, sizes of parallel axes."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, P, documented, given

LOADERS = "test_the_settings_of_loaders_are_read_and_set"
GIVEN = "test_handlers_are_those_that_were_given"
RECIPES = "test_the_recipe_of_fp8_is_that_of_its_library"
NAMED = "test_trackers_are_named_to_the_accelerator"
SCALED = "test_the_scaler_comes_back"
ONE = "test_what_a_run_of_one_process_shows"
LATER = "test_generators_and_schedulers_are_set_for_what_is_prepared_later"
NO_FP8 = "test_a_run_without_fp8_says_so"
ENGINE = "test_an_accelerator_shows_its_engine_as_documented"
TWO = "test_what_a_sharded_run_of_two_processes_shows"
RANKS = "test_ranks_along_the_axes[0-expected0-True]"
OTHER_RANKS = "test_ranks_along_axes_of_the_model[pp-1]"
PROPERTIES = "test_sizes_and_what_follows_from_them"
SHARDS = "test_shards_switch_fsdp_on"
SPLIT_WEIGHTS = "test_a_tensor_parallel_size_switches_that_on"
FP8 = "test_fp8_takes_the_library_that_is_installed"
PLUGIN = "test_a_state_takes_the_plugin_of_tensor_parallelism"
PLUGINS = "test_plugins_and_sizes_of_a_state"

ENTRIES = [
    Entry(
        "accel:Accelerator",
        parameters={"parallelism_config": P(None, TWO, keyword=True)},
        attributes={
            "split_batches": LOADERS,
            "dispatch_batches": LOADERS,
            "even_batches": LOADERS,
            "use_seedable_sampler": LOADERS,
            "non_blocking": LOADERS,
            "use_stateful_dataloader": LOADERS,
            "dataloader_config": LOADERS,
            "project_configuration": ONE,
            "logging_dir": ONE,
            "step_scheduler_with_optimizer": LATER,
            "rng_types": LATER,
            "fp8_enabled": FP8,
            "delayed_fp8_autocast": NO_FP8,
            "fp8_backend": FP8,
            "fp8_recipe_handler": FP8,
            "native_amp": "test_autocast_is_switched_off",
            "deepspeed_plugin": "test_the_active_plugin_of_deepspeed",
            "deepspeed_config": ENGINE,
            "deepspeed_engine_wrapped": ENGINE,
            "is_fsdp2": TWO,
            "is_composable_parallelism_enabled": TWO,
            "multi_device": TWO,
            "parallelism_config": TWO,
            "should_save_model": TWO,
            "torch_device_mesh": TWO,
            **dict.fromkeys(
                (
                    *("autocast_handler", "ddp_handler", "profile_handler"),
                    *("scaler_handler", "init_handler"),
                ),
                GIVEN,
            ),
            "te_recipe_handler": RECIPES,
            "ao_recipe_handler": RECIPES,
            "scaler": SCALED,
            "log_with": NAMED,
            "gradient_state": "test_the_number_of_micro_batches_can_change",
            "has_lomo_optimizer": "test_lomo_optimizers_update_in_the_backward_pass",
            "flag_tensor": "test_a_trigger_is_found_once",
            "parallel_dims": ONE,
            "data_parallel_rank": RANKS,
            "data_parallel_shard_rank": RANKS,
            "tensor_parallel_rank": RANKS,
            "context_parallel_rank": OTHER_RANKS,
            "pipeline_parallel_rank": OTHER_RANKS,
        },
        call=False,
    ),
    Entry(
        "accel:Accelerator.maybe_context_parallel",
        "test_sequences_are_not_sharded",
    ),
    Entry(
        "accel.utils:shift_labels",
        "test_gradients_are_those_of_one_process",
    ),
    Entry(
        "accel:Accelerator.deepspeed_ulysses_dl_adapter",
        "test_sequences_are_not_sharded",
    ),
    Entry(
        "accel.state:AcceleratorState",
        parameters={
            "torch_tp_plugin": P(None, PLUGIN, keyword=True),
            "parallelism_config": P(None, PLUGINS, keyword=True),
        },
        attributes={
            "fork_launched": "test_a_forked_process_knows_it",
            "is_fsdp2": TWO,
            "fsdp_plugin": TWO,
            "torch_tp_plugin": PLUGIN,
            "parallelism_config": PLUGINS,
        },
        call=False,
    ),
    Entry(
        "accel.state:is_initialized",
        "test_whether_there_is_a_state_is_asked_without_building_one",
    ),
    Entry(
        "accel.state:GradientState",
        attributes={
            "is_xla_gradients_synced": "test_gradients_of_a_tpu_are_never_in_sync",
        },
        call=False,
    ),
    Entry(
        "accel.parallelism_config:ParallelismConfig",
        PROPERTIES,
        parameters={
            **given(SHARDS, dp_replicate_size=None, dp_shard_size=None),
            "tp_size": P(None, SPLIT_WEIGHTS),
            "cp_size": P(None, "test_ranks_of_a_sequence_shard_the_model"),
            "cp_backend": P(None, "test_wrong_values_are_named"),
            "sp_size": P(None, "test_ranks_of_a_sequence_shard_the_model"),
            "sp_backend": P(None, "test_wrong_values_are_named"),
            "tp_handler": P(None, "test_what_is_not_built_yet_is_refused[tp_handler]"),
            "cp_handler": P(None, "test_what_is_not_built_yet_is_refused[cp_handler]"),
            "sp_handler": P(None, "test_what_is_not_built_yet_is_refused[sp_handler]"),
        },
        attributes={
            name: PROPERTIES
            for name in (
                *("total_size", "data_parallel_size", "non_data_parallel_size"),
                *("dp_replicate_enabled", "dp_shard_enabled", "tp_enabled"),
                *("active_mesh_dims", "dp_dim_names", "non_dp_dim_names", "fsdp_dim_names"),
                *("dp_shard_cp_dim_names", "dp_cp_dim_names"),
            )
        },
    ),
    documented(
        "accel.parallelism_config:ParallelismConfig.build_device_mesh",
        "test_a_mesh_answers_to_joined_axes",
        device_type=REQUIRED,
    ),
]
