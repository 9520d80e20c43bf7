"""Kwargs handlers (documentation page: kwargs handlers)."""

from __future__ import annotations

from typing import Any

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented

OFF = "test_autocast_is_off_where_it_is_not_enabled"
CACHE = "test_autocast_keeps_casts_of_weights_unless_it_is_told_not_to"
DDP = "test_ddp_does_what_the_handler_says"
DIFFERING = "test_only_what_differs_is_handed_on"
BY_NAME = "test_hooks_are_named_by_value_or_by_member"
SCALE = "test_the_scale_of_losses_grows_and_backs_off_as_the_handler_says"
GROUP = "test_the_live_group_is_as_the_handler_says"
RECIPE = "test_each_field_of_a_recipe"
ENGINES = "test_both_engines_have_the_older_recipe"
FORMATS = "test_the_formats_and_histories_of_a_recipe"
SWAPPED = "test_layers_are_swapped_in_and_out_with_their_parameters"
KINDS = "test_kinds_of_layers_are_left_on_request"
IN_FP8 = "test_a_forward_computes_in_fp8_while_it_trains"
LEVELS = "test_the_levels_of_a_recipe"
FIRST = "test_an_activity_is_recorded"
SCHEDULE = "test_a_schedule_says_which_steps_are_recorded"
EACH_HOOK = "test_a_hook_and_its_wrapper_show_in_the_numbers"
EACH_WRAPPER = EACH_HOOK


def recipe(*names: str) -> dict[str, P]:
    return {name: P(None, RECIPE) for name in names}


DELAYED = ("margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo")
LAST = "override_linear_precision"
HISTORIES: dict[str, Any] = {
    "fp8_format": dict.fromkeys(("E4M3", "HYBRID", "E5M2"), FORMATS),
    "amax_compute_algo": dict.fromkeys(("max", "most_recent"), FORMATS),
}

ENTRIES = [
    Entry("accel.utils:KwargsHandler.to_kwargs", DIFFERING),
    documented("accel.utils:AutocastKwargs", OFF, enabled=True, cache_enabled=P(None, CACHE)),
    Entry(
        "accel.utils:DistributedDataParallelKwargs",
        DDP,
        parameters={
            "dim": P(0, DDP),
            "broadcast_buffers": P(True, DDP),
            "bucket_cap_mb": P(25, DDP),
            "find_unused_parameters": P(False, DDP),
            "check_reduction": P(False, DIFFERING),  # torch ignores it
            "gradient_as_bucket_view": P(False, DDP),
            "static_graph": P(False, DDP),
            "comm_hook": P("no", EACH_HOOK),
            "comm_wrapper": P("no", EACH_WRAPPER),
            "comm_state_option": P(dict, "test_the_state_of_a_hook_takes_its_options"),
        },
        choices={
            "comm_hook": dict.fromkeys(
                ("fp16", "bf16", "power_sgd", "batched_power_sgd"), EACH_HOOK
            ),
            "comm_wrapper": dict.fromkeys(("no", "fp16", "bf16"), EACH_WRAPPER),
        },
    ),
    Entry(
        "accel.utils:DDPCommunicationHookType",
        call=False,
        attributes=dict.fromkeys(("NO", "FP16", "BF16", "POWER_SGD", "BATCHED_POWER_SGD"), BY_NAME),
    ),
    Entry(
        "accel.utils:FP8RecipeKwargs",
        RECIPE,
        parameters=recipe(
            *("opt_level", "use_autocast_during_eval", *DELAYED, LAST),
            *("use_mxfp8_block_scaling", "backend"),
        ),
        choices={
            "backend": dict.fromkeys(("TE", "MSAMP", "te", "msamp"), ENGINES),
            "opt_level": dict.fromkeys(("O1", "O2"), LEVELS),
            **HISTORIES,
        },
    ),
    Entry(
        "accel.utils:TERecipeKwargs",
        RECIPE,
        parameters=recipe("use_autocast_during_eval", *DELAYED, LAST, "use_mxfp8_block_scaling"),
        choices=HISTORIES,
    ),
    documented(
        "accel.utils:convert_model",
        SWAPPED,
        model=REQUIRED,
        to_transformer_engine=True,
        _convert_linear=P(True, KINDS),
        _convert_ln=P(True, KINDS),
    ),
    documented("accel.utils:has_transformer_engine_layers", SWAPPED, model=REQUIRED),
    documented(
        "accel.utils:contextual_fp8_autocast",
        IN_FP8,
        NoOp.FIRST,
        model_forward=REQUIRED,
        fp8_recipe=REQUIRED,
        use_during_eval=False,
    ),
    documented(
        "accel.utils:apply_fp8_autowrap",
        "test_a_model_is_wrapped[handler1-True]",
        NoOp.FIRST,
        model=P(REQUIRED, "test_a_model_is_wrapped[None-False]"),
        fp8_recipe_handler=None,
    ),
    Entry(
        "accel.utils:MSAMPRecipeKwargs",
        RECIPE,
        parameters=recipe("opt_level"),
        choices={"opt_level": dict.fromkeys(("O1", "O2"), LEVELS)},
    ),
    Entry(
        "accel.utils:AORecipeKwargs",
        RECIPE,
        parameters=recipe(
            "config", "module_filter_func", "pad_inner_dim", "enable_fsdp_float8_all_gather"
        ),
    ),
    Entry(
        "accel.utils:ProfileKwargs",
        SCHEDULE,
        parameters={
            "activities": P(None, "test_all_activities_are_recorded_by_default"),
            "schedule_option": P(None, SCHEDULE),
            "on_trace_ready": P(None, "test_a_callable_gets_each_complete_trace"),
            "record_shapes": P(False, "test_shapes_are_kept_on_request"),
            "profile_memory": P(False, "test_allocations_are_kept_on_request"),
            "with_stack": P(False, "test_stacks_are_kept_on_request"),
            "with_flops": P(False, "test_operations_are_estimated_on_request"),
            "with_modules": P(False, "test_modules_are_kept_on_request"),
            "output_trace_dir": P(None, "test_each_cycle_of_a_schedule_is_written"),
        },
        choices={
            "activities": dict.fromkeys(("cpu", "xpu", "mtia", "cuda"), FIRST),
            "schedule_option": dict.fromkeys(
                ("wait", "warmup", "active", "repeat", "skip_first"), SCHEDULE
            ),
        },
    ),
    documented(
        "accel.utils:ProfileKwargs.build",
        SCHEDULE,
        on_trace_ready=P(None, "test_build_takes_a_callable_where_the_handler_has_none"),
    ),
    documented(
        "accel.utils:GradScalerKwargs",
        SCALE,
        init_scale=65536.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
    ),
    documented(
        "accel.utils:InitProcessGroupKwargs", GROUP, backend="nccl", init_method=None, timeout=None
    ),
]
