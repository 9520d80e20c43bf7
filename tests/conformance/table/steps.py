"""The step: accumulation, gradients, optimizer and scheduler wrappers (pages: accelerator, state
classes, internals)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented, given

WINDOWS = "test_a_window_ends_with_the_loader_unless_told_otherwise"
SEVERAL = "test_several_models_exchange_gradients_where_their_window_ends[2]"
EACH_BATCH = "test_every_micro_batch_exchanges_gradients_if_told_so[2]"
EXCHANGES = "test_exchanges_can_be_put_off_and_triggered[2]"
UNEVEN = "test_processes_that_run_out_of_batches_shadow_the_others[2]"
READ = "test_the_state_knows_the_loader_that_is_read[2]"
ENVIRONMENT = "test_the_environment_gives_the_number_of_micro_batches"
SETTINGS = "test_the_plugins_settings_arrive"
CLIPPED = "test_gradients_are_clipped_by_norm_and_by_value"
BACKWARD = "test_backward_takes_the_arguments_of_torch"
LOMO = "test_lomo_optimizers_update_in_the_backward_pass"
UNSCALED = "test_gradients_are_unscaled_once_and_only_where_asked"
OVERFLOW = "test_an_overflow_skips_the_step_and_the_scheduler_and_lowers_the_scale"
AUTOCAST = "test_autocast_takes_a_handler_in_place_of_the_runs_own"
ORDER = "test_calls_within_a_window_count_for_the_order_of_calls"
OF_THE_RUN = "test_a_step_of_the_optimizer_is_one_of_the_schedule_for_each_process[2]"
SCHEDULED = "test_it_steps_at_the_end_of_a_window"
SCHEDULE_STATE = "test_scheduler.py::test_state_goes_out_and_in"
WRAPPED = "test_it_is_an_optimizer_with_the_state_of_the_wrapped_one"
WAITS = "test_step_and_zero_grad_wait_for_the_end_of_a_window"
CLOSURE = "test_a_closure_is_handed_on"
STATE = "test_optimizer.py::test_state_goes_out_and_in"
PLACED = "test_state_goes_to_the_device_of_its_parameter"
SCALER = "test_the_scaler_unscales_gradients_and_skips_what_overflowed"
SWITCHED = "test_a_schedule_free_optimizer_is_switched_to_evaluation_and_back"

NUMBER = "test_a_plain_number_is_normalised_too"
EQUAL_STEPS = "test_any_number_of_processes_makes_the_exact_steps[2-own]"

WINDOW = "test_a_window_is_that_of_a_plain_loop[1]"

METHODS = [
    documented(
        "accel:Accelerator.forward_backward",
        WINDOW,
        model=REQUIRED,
        micro_batches=REQUIRED,
        loss_fn=REQUIRED,
    ),
    documented("accel:Accelerator.accumulate", WINDOWS, NoOp.CONTEXT, models=P(REQUIRED, SEVERAL)),
    documented("accel:Accelerator.backward", BACKWARD, loss=REQUIRED, kwargs=REQUIRED),
    documented("accel:Accelerator.lomo_backward", LOMO, loss=REQUIRED, learning_rate=REQUIRED),
    documented(
        "accel:Accelerator.clip_grad_norm_",
        CLIPPED,
        parameters=REQUIRED,
        max_norm=REQUIRED,
        norm_type=2,
    ),
    documented(
        "accel:Accelerator.clip_grad_value_", CLIPPED, parameters=REQUIRED, clip_value=REQUIRED
    ),
    documented("accel:Accelerator.unscale_gradients", UNSCALED, optimizer=None),
    documented("accel:Accelerator.no_sync", EXCHANGES, NoOp.CONTEXT, model=None),
    documented(
        "accel:Accelerator.trigger_sync_in_backward", EXCHANGES, NoOp.CONTEXT, model=REQUIRED
    ),
    documented(
        "accel:Accelerator.join_uneven_inputs",
        UNEVEN,
        NoOp.CONTEXT,
        joinables=REQUIRED,
        even_batches=None,
    ),
    documented("accel:Accelerator.autocast", AUTOCAST, NoOp.CONTEXT, autocast_handler=None),
]

SETTINGS_OF_A_RUN = [
    Entry(
        "accel:Accelerator",
        call=False,
        attributes={
            "gradient_accumulation_steps": ENVIRONMENT,
            "optimizer_step_was_skipped": OVERFLOW,
            "sync_gradients": "test_without_a_loader_micro_batches_are_counted",
        },
    ),
    Entry(  # ACCELERATE_GRADIENT_ACCUMULATION_STEPS
        "accel.machine.env:Environment", call=False, attributes={"accumulation_steps": ENVIRONMENT}
    ),
    documented(
        "accel.utils:GradientAccumulationPlugin",
        SETTINGS,
        num_steps=None,
        adjust_scheduler=P(True, ORDER),
        sync_with_dataloader=P(True, WINDOWS),
        sync_each_batch=P(False, EACH_BATCH),
    ),
    Entry(
        "accel.state:GradientState",
        SETTINGS,
        parameters=given(SETTINGS, gradient_accumulation_plugin=None),
        attributes={
            "end_of_dataloader": READ,
            "remainder": READ,
            "sync_gradients": WAITS,
            "active_dataloader": READ,
            "dataloader_references": READ,
            "num_steps": SETTINGS,
            "adjust_scheduler": ORDER,
            "sync_with_dataloader": WINDOWS,
            "distributed_type": READ,
        },
    ),
]

WRAPPERS = [
    Entry(
        "accel.optimizer:AcceleratedOptimizer",
        WRAPPED,
        parameters={
            "optimizer": P(REQUIRED, WRAPPED),
            "device_placement": P(True, PLACED),
            "scaler": P(None, SCALER),
        },
        attributes={
            "step_was_skipped": SCALER,
            "accelerator_state": "test_it_knows_the_state_of_the_process",
        },
    ),
    documented("accel.optimizer:AcceleratedOptimizer.step", WAITS, closure=P(None, CLOSURE)),
    documented("accel.optimizer:AcceleratedOptimizer.zero_grad", WAITS, set_to_none=None),
    documented(
        "accel.optimizer:AcceleratedOptimizer.add_param_group", WRAPPED, param_group=REQUIRED
    ),
    Entry("accel.optimizer:AcceleratedOptimizer.state_dict", STATE),
    documented("accel.optimizer:AcceleratedOptimizer.load_state_dict", STATE, state_dict=REQUIRED),
    Entry("accel.optimizer:AcceleratedOptimizer.train", SWITCHED),
    Entry("accel.optimizer:AcceleratedOptimizer.eval", SWITCHED),
    documented(
        "accel.scheduler:AcceleratedScheduler",
        SCHEDULED,
        scheduler=REQUIRED,
        optimizers=P(REQUIRED, "test_it_does_not_step_where_the_optimizer_did_not"),
        step_with_optimizer=P(True, "test_one_of_its_own_steps_whenever_it_is_called"),
        split_batches=P(False, OF_THE_RUN),
    ),
    documented(
        "accel.scheduler:AcceleratedScheduler.step",
        SCHEDULED,
        args=P(REQUIRED, "test_a_plateau_counts_measurements_not_processes[1]"),
        kwargs=P(REQUIRED, "test_a_plateau_counts_measurements_not_processes[1]"),
    ),
    Entry("accel.scheduler:AcceleratedScheduler.get_last_lr", SCHEDULED),
    Entry("accel.scheduler:AcceleratedScheduler.get_lr", SCHEDULE_STATE),
    Entry("accel.scheduler:AcceleratedScheduler.state_dict", SCHEDULE_STATE),
    documented(
        "accel.scheduler:AcceleratedScheduler.load_state_dict", SCHEDULE_STATE, state_dict=REQUIRED
    ),
]

NORMALISATION = [
    documented(
        "accel.run.loss_normalization:normalize_loss",
        EQUAL_STEPS,
        NoOp.FIRST,
        total=P(REQUIRED, NUMBER),
        global_weight=P(REQUIRED, NUMBER),
        grad_size=P(REQUIRED, NUMBER),
        num_steps=P(REQUIRED, NUMBER),
    ),
    documented(
        "accel.run.loss_normalization:global_weight",
        EQUAL_STEPS,
        weights=REQUIRED,
        accelerator=REQUIRED,
    ),
]

ENTRIES = [*METHODS, *SETTINGS_OF_A_RUN, *WRAPPERS, *NORMALISATION]
