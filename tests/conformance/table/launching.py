"""Starting processes, variables and CPUs (documentation pages: launchers, utilities, cli)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, given, one_test

MERGED = "test_shards_of_two_processes_are_merged[model]"

DEBUGGED = "test_a_function_runs_on_processes_of_the_cpu"
TRAINED = "test_a_notebook_trains_on_several_processes"
NODES = "test_nodes_meet_at_the_first"
PURGED = "test_a_functions_variables_are_purged"
PATCHED = "test_variables_are_patched_in_a_context"
LISTENED = "test_a_port_is_in_use_while_a_program_listens"
RANKED = "test_a_process_learns_its_rank_from_its_index"
TRUTH = "test_a_text_is_a_truth_value"
DEFAULTS = "test_variables_are_read_with_a_default"
NUMBERS = "test_the_first_number_of_several_variables_is_taken"
IN_TURN = "test_processes_take_the_nodes_in_turn"
BOUND_ONCE = "test_the_first_binding_stays_unless_it_is_overridden"

ENTRIES = [
    Entry(
        "accel:debug_launcher",
        DEBUGGED,
        parameters={
            **given(DEBUGGED, function=REQUIRED, args=()),
            "num_processes": P(2, "test_the_number_of_processes_to_debug_with"),
        },
    ),
    Entry(
        "accel:notebook_launcher",
        TRAINED,
        parameters={
            **given(TRAINED, function=REQUIRED, args=()),
            "num_processes": P(None, NODES),
            "mixed_precision": P("no", "test_one_process_is_the_notebook_itself"),
            **given(
                NODES,
                use_port="29500",
                master_addr="127.0.0.1",
                node_rank=0,
                num_nodes=1,
                rdzv_backend="static",
                rdzv_endpoint="",
                rdzv_conf=None,
                rdzv_id="none",
            ),
            "max_restarts": P(0, "test_a_failed_group_starts_anew"),
            **given(NODES, monitor_interval=0.1, log_line_prefix_template=None),
        },
    ),
    one_test("accel.utils:is_port_in_use", LISTENED, port=None),
    Entry(
        "accel.utils:PrepareForLaunch",
        RANKED,
        parameters={
            **given(RANKED, launcher=REQUIRED, distributed_type="NO"),
            "debug": P(False, "test_debugging_has_a_launcher_of_its_own"),
        },
    ),
    one_test("accel.utils:PrepareForLaunch.__call__", RANKED, index=REQUIRED, args=REQUIRED),
    one_test("accel.utils:str_to_bool", TRUTH, value=REQUIRED, to_bool=False),
    one_test("accel.utils:parse_flag_from_env", DEFAULTS, key=REQUIRED, default=False),
    one_test("accel.utils:parse_choice_from_env", DEFAULTS, key=REQUIRED, default="no"),
    one_test("accel.utils:get_int_from_env", NUMBERS, env_keys=REQUIRED, default=REQUIRED),
    one_test("accel.utils:patch_environment", PATCHED, NoOp.CONTEXT, kwargs=REQUIRED),
    Entry(
        "accel.utils:clear_environment",
        "test_variables_are_cleared_in_a_context",
        NoOp.CONTEXT,
    ),
    one_test("accel.utils:purge_accelerate_environment", PURGED, NoOp.FIRST, func_or_cls=REQUIRED),
    Entry(
        "accel.utils:write_basic_config",
        "test_the_machines_settings_are_those_of_the_public_package",
        parameters={
            "mixed_precision": P("no", "test_the_precision_is_written"),
            "save_location": P(None, "test_the_machines_settings_are_those_of_the_public_package"),
        },
    ),
    one_test(
        "accel.utils.environment:override_numa_affinity",
        IN_TURN,
        local_process_index=REQUIRED,
        verbose=None,
    ),
    one_test(
        "accel.utils:set_numa_affinity", BOUND_ONCE, local_process_index=REQUIRED, verbose=None
    ),
    one_test(
        "accel.utils:merge_fsdp_weights",
        MERGED,
        checkpoint_dir=REQUIRED,
        output_path=REQUIRED,
        safe_serialization=True,
        remove_checkpoint_dir=False,
    ),
]
