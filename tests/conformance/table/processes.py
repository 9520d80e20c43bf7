"""Who a process is and who runs what (documentation pages: states, internals, accelerator).

The constructor of the `Accelerator` and what it trains are in other files.
"""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented

WHO = "test_who_a_process_is[2]"
DECORATED = "test_decorators_in_both_forms[2]"
ORDER = "comm/test_processes.py::test_the_main_process_goes_first"
PARTS = "test_each_process_gets_its_part"
PADDED = "test_short_parts_are_completed_with_the_last_element"
PRINTED = "test_one_process_per_node_prints[2]"
WAITED = "test_everyone_is_waited_for[2]"
TRIGGER = "test_a_trigger_of_any_process_is_found_by_all_once[2]"
KWARGS = "test_keyword_arguments_set_the_process_group_up"

IDENTITY = dict.fromkeys(
    (
        *("device", "distributed_type", "local_process_index", "mixed_precision"),
        *("num_processes", "process_index", "is_last_process", "is_main_process"),
        "is_local_main_process",
    ),
    WHO,
)
STATE_ATTRIBUTES = {**IDENTITY, "debug": "test_debug_comes_from_the_environment"}


def control(owner: str) -> list[Entry]:
    """Return the rows of process control, as an object of the class `owner` offers it."""
    contexts = [
        Entry(f"{owner}.{name}", f"{ORDER}[{name}-2]", NoOp.CONTEXT)
        for name in ("main_process_first", "local_main_process_first")
    ]
    decorators = [
        documented(f"{owner}.{name}", DECORATED, NoOp.DECORATOR, function=None)
        for name in ("on_main_process", "on_local_main_process", "on_last_process")
    ]
    of_one = [
        Entry(
            f"{owner}.{name}",
            DECORATED,
            NoOp.DECORATOR,
            {"function": P(None, DECORATED), index: P(None, DECORATED)},
        )
        for name, index in (
            ("on_process", "process_index"),
            ("on_local_process", "local_process_index"),
        )
    ]
    parts = documented(
        f"{owner}.split_between_processes",
        PARTS,
        NoOp.FIRST_IN_CONTEXT,
        inputs=REQUIRED,
        apply_padding=P(False, PADDED),
    )
    return [
        *contexts,
        *decorators,
        *of_one,
        parts,
        Entry(f"{owner}.wait_for_everyone", WAITED),
        Entry(f"{owner}.print", PRINTED),
    ]


ENTRIES = [
    Entry(
        "accel:PartialState",
        WHO,
        parameters={
            "cpu": P(False, "test_cpu_ignores_the_accelerator_of_the_machine[PartialState]"),
            "kwargs": P({}, KWARGS, keyword=True),
        },
        attributes=STATE_ATTRIBUTES,
    ),
    *control("accel:PartialState"),
    Entry(
        "accel.state:AcceleratorState",
        WHO,
        parameters={
            "mixed_precision": P(None, "test_what_was_set_up_cannot_change"),
            "cpu": P(False, "test_cpu_ignores_the_accelerator_of_the_machine[AcceleratorState]"),
            "dynamo_plugin": P(None, "test_a_plugin_says_how_models_are_compiled"),
            "deepspeed_plugin": P(
                None, "test_plugins_of_another_kind_are_refused[deepspeed_plugin]"
            ),
            "fsdp_plugin": P(None, "test_plugins_of_another_kind_are_refused[fsdp_plugin]"),
            "megatron_lm_plugin": P(
                None, "test_plugins_of_another_kind_are_refused[megatron_lm_plugin]"
            ),
            "_from_accelerator": P(
                False,
                "test_a_state_of_an_accelerator_begins_anew_where_the_last_run_has_ended",
            ),
            "kwargs": P({}, KWARGS, keyword=True),
        },
        attributes={
            **STATE_ATTRIBUTES,
            "initialized": "test_accelerator_state_is_built_on_the_partial_one",
        },
    ),
    *control("accel.state:AcceleratorState"),
    Entry("accel:Accelerator", attributes={**IDENTITY, "use_distributed": WHO}, call=False),
    *control("accel:Accelerator"),
    Entry("accel:Accelerator.set_trigger", TRIGGER),
    Entry("accel:Accelerator.check_trigger", TRIGGER),
    Entry("accel:Accelerator.check_breakpoint", TRIGGER),
    Entry("accel.utils:wait_for_everyone", WAITED),
]
