"""The Accelerator itself (documentation page: Accelerator): constructor, attributes, preparing."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented

WHO = "test_who_a_process_is[1]"
MOVED = "test_a_model_is_moved_unless_told_otherwise"
PRECISIONS = "test_each_precision_by_its_name"
FP8 = "test_fp8_takes_the_library_that_is_installed"
SETTINGS = "test_the_plugins_settings_arrive"
ALONE = "test_cpu_ignores_the_accelerator_of_the_machine[Accelerator]"
NOT_BUILT = "test_a_plugin_of_another_kind_is_refused"
GENERATORS = "test_generators_that_are_not_there_are_refused"
FOLDERS = "test_states_and_logs_go_where_the_run_says"
NAMED = "test_trackers_are_named_to_the_accelerator"
COMPILED = "test_models_are_compiled_with_the_backend_of_the_run"
SPLIT = "test_split_and_even_batches[2]"
ORDER = "test_prepare_keeps_the_order_of_its_arguments"
PLACES = "test_device_placement_is_told_for_each_object"
EVALUATED = "test_a_model_that_is_only_evaluated_needs_no_wrapper"
PREPARED_ALONE = "test_an_optimizer_and_its_scheduler_are_prepared_alone"
UNWRAPPED = "test_unwrapping_stops_at_the_users_own_module"
OWN_FORWARD = "test_unwrapping_gives_the_models_own_forward_back"
FORGOTTEN = "test_free_memory_lets_go_of_everything"
OWN_TRACKER = "test_a_tracker_of_the_users_own_as_a_class_and_as_an_object"
BOARD = "test_tensorboard_gets_scalars_text_images_and_hyper_parameters"
MAPS = "test_device_maps_are_found"
SCHEDULED = "test_a_step_of_the_optimizer_is_one_of_the_schedule_for_each_process[1]"
RUNS_OWN = "test_the_runs_own_handler_holds_unless_another_is_given"

ENTRIES = [
    Entry(
        "accel:Accelerator",
        WHO,
        parameters={
            "device_placement": P(True, MOVED),
            "split_batches": P(None, SPLIT),
            "mixed_precision": P(None, PRECISIONS),
            "gradient_accumulation_steps": P(1, SETTINGS),
            "cpu": P(False, ALONE),
            "dataloader_config": P(None, "test_the_settings_of_loaders_are_read_and_set"),
            "deepspeed_plugin": P(None, NOT_BUILT),
            "fsdp_plugin": P(None, NOT_BUILT),
            "megatron_lm_plugin": P(None, NOT_BUILT),
            "rng_types": P(None, "test_a_pass_synchronises_the_named_generators[2]"),
            "log_with": P(None, NAMED),
            "project_dir": P(None, FOLDERS),
            "project_config": P(None, FOLDERS),
            "gradient_accumulation_plugin": P(None, SETTINGS),
            "step_scheduler_with_optimizer": P(True, SCHEDULED),
            "kwargs_handlers": P(None, "test_autocast_is_off_where_it_is_not_enabled"),
            "dynamo_backend": P(None, COMPILED),
            "deepspeed_plugins": P(None, NOT_BUILT),
            # Older spellings, and those of the examples.
            "logging_dir": P(None, FOLDERS, keyword=True),
            "dispatch_batches": P(None, "test_who_reads", keyword=True),
            "even_batches": P(None, SPLIT, keyword=True),
            "use_seedable_sampler": P(None, "test_the_order_is_seeded", keyword=True),
            "kwarg_handler": P(
                None,
                "test_the_spelling_of_the_documentations_example_is_understood",
                keyword=True,
            ),
            "dynamo_plugin": P(None, COMPILED, keyword=True),
        },
        attributes={  # others are in the parts on processes, steps and saving
            "device_placement": MOVED,
            "project_dir": FOLDERS,
            "state": PRECISIONS,
            "step": FORGOTTEN,
            "trackers": BOARD,
        },
        choices={
            "mixed_precision": {
                "no": PRECISIONS,
                "fp16": PRECISIONS,
                "bf16": PRECISIONS,
                "fp8": FP8,
            },
            "rng_types": dict.fromkeys(("torch", "cuda", "xla", "generator"), GENERATORS),
            "log_with": dict.fromkeys(("all", "tensorboard", "wandb", "comet_ml"), NAMED),
            "dynamo_backend": {"no": COMPILED},
        },
    ),
    documented(
        "accel:Accelerator.prepare",
        ORDER,
        NoOp.ALL,
        args=REQUIRED,
        device_placement=P(None, PLACES),
    ),
    documented(
        "accel:Accelerator.prepare_model",
        MOVED,
        NoOp.FIRST,
        model=REQUIRED,
        device_placement=None,
        evaluation_mode=P(False, EVALUATED),
    ),
    documented(
        "accel:Accelerator.prepare_optimizer",
        PREPARED_ALONE,
        NoOp.FIRST,
        optimizer=REQUIRED,
        device_placement=None,
    ),
    documented(
        "accel:Accelerator.prepare_scheduler", PREPARED_ALONE, NoOp.FIRST, scheduler=REQUIRED
    ),
    documented(
        "accel:Accelerator.unwrap_model",
        UNWRAPPED,
        NoOp.FIRST,
        model=REQUIRED,
        keep_fp32_wrapper=P(True, OWN_FORWARD),
    ),
    Entry("accel:Accelerator.free_memory", FORGOTTEN),
    Entry("accel:Accelerator.clear", FORGOTTEN),
    Entry("accel:Accelerator.end_training", OWN_TRACKER),
    documented(
        "accel:Accelerator.profile",
        "test_profiling_needs_no_handler",
        NoOp.CONTEXT,
        profile_handler=P(None, RUNS_OWN),
    ),
    documented("accel:Accelerator.verify_device_map", MAPS, model=REQUIRED),
    documented("accel:Accelerator.get_tracker", OWN_TRACKER, name=REQUIRED, unwrap=P(False, BOARD)),
    documented(
        "accel:Accelerator.init_trackers",
        OWN_TRACKER,
        project_name=REQUIRED,
        config=None,
        init_kwargs=None,
    ),
    documented(
        "accel:Accelerator.log_images",
        OWN_TRACKER,
        values=REQUIRED,
        step=None,
        log_kwargs=P(None, "test_arguments_of_a_call_name_a_tracker[None-log_images]"),
    ),
    documented("accel:Accelerator.log", OWN_TRACKER, values=REQUIRED, step=None, log_kwargs=None),
]
