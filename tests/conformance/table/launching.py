"""Starting processes, variables and CPUs (documentation pages: launchers, utilities, cli)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented

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
    documented(
        "accel:debug_launcher",
        DEBUGGED,
        function=REQUIRED,
        args=(),
        num_processes=P(2, "test_the_number_of_processes_to_debug_with"),
    ),
    documented(
        "accel:notebook_launcher",
        TRAINED,
        function=REQUIRED,
        args=(),
        num_processes=P(None, NODES),
        mixed_precision=P("no", "test_one_process_is_the_notebook_itself"),
        use_port=P("29500", NODES),
        master_addr=P("127.0.0.1", NODES),
        node_rank=P(0, NODES),
        num_nodes=P(1, NODES),
        rdzv_backend=P("static", NODES),
        rdzv_endpoint=P("", NODES),
        rdzv_conf=P(None, NODES),
        rdzv_id=P("none", NODES),
        max_restarts=P(0, "test_a_failed_group_starts_anew"),
        monitor_interval=P(0.1, NODES),
        log_line_prefix_template=P(None, NODES),
    ),
    documented("accel.utils:is_port_in_use", LISTENED, port=None),
    documented(
        "accel.utils:PrepareForLaunch",
        RANKED,
        launcher=REQUIRED,
        distributed_type="NO",
        debug=P(False, "test_debugging_has_a_launcher_of_its_own"),
    ),
    documented("accel.utils:PrepareForLaunch.__call__", RANKED, index=REQUIRED, args=REQUIRED),
    documented("accel.utils:str_to_bool", TRUTH, value=REQUIRED, to_bool=False),
    documented("accel.utils:parse_flag_from_env", DEFAULTS, key=REQUIRED, default=False),
    documented("accel.utils:parse_choice_from_env", DEFAULTS, key=REQUIRED, default="no"),
    documented("accel.utils:get_int_from_env", NUMBERS, env_keys=REQUIRED, default=REQUIRED),
    documented("accel.utils:patch_environment", PATCHED, NoOp.CONTEXT, kwargs=REQUIRED),
    Entry(
        "accel.utils:clear_environment",
        "test_variables_are_cleared_in_a_context",
        NoOp.CONTEXT,
    ),
    documented(
        "accel.utils:purge_accelerate_environment", PURGED, NoOp.FIRST, func_or_cls=REQUIRED
    ),
    documented(
        "accel.utils:write_basic_config",
        "test_the_machines_settings_are_those_of_the_public_package",
        mixed_precision=P("no", "test_the_precision_is_written"),
        save_location=None,
    ),
    documented(
        "accel.utils.environment:override_numa_affinity",
        IN_TURN,
        local_process_index=REQUIRED,
        verbose=None,
    ),
    documented(
        "accel.utils:set_numa_affinity", BOUND_ONCE, local_process_index=REQUIRED, verbose=None
    ),
    documented(
        "accel.utils:merge_fsdp_weights",
        MERGED,
        checkpoint_dir=REQUIRED,
        output_path=REQUIRED,
        safe_serialization=True,
        remove_checkpoint_dir=False,
    ),
]
