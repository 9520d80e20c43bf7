"""Starting processes, variables and CPUs (documentation pages: launchers, utilities, cli)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P

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
            "function": P(REQUIRED, DEBUGGED),
            "args": P((), DEBUGGED),
            "num_processes": P(2, "test_the_number_of_processes_to_debug_with"),
        },
    ),
    Entry(
        "accel:notebook_launcher",
        TRAINED,
        parameters={
            "function": P(REQUIRED, TRAINED),
            "args": P((), TRAINED),
            "num_processes": P(None, NODES),
            "mixed_precision": P("no", "test_one_process_is_the_notebook_itself"),
            "use_port": P("29500", NODES),
            "master_addr": P("127.0.0.1", NODES),
            "node_rank": P(0, NODES),
            "num_nodes": P(1, NODES),
            "rdzv_backend": P("static", NODES),
            "rdzv_endpoint": P("", NODES),
            "rdzv_conf": P(None, NODES),
            "rdzv_id": P("none", NODES),
            "max_restarts": P(0, "test_a_failed_group_starts_anew"),
            "monitor_interval": P(0.1, NODES),
            "log_line_prefix_template": P(None, NODES),
        },
    ),
    Entry("accel.utils:is_port_in_use", LISTENED, parameters={"port": P(None, LISTENED)}),
    Entry(
        "accel.utils:PrepareForLaunch",
        RANKED,
        parameters={
            "launcher": P(REQUIRED, RANKED),
            "distributed_type": P("NO", RANKED),
            "debug": P(False, "test_debugging_has_a_launcher_of_its_own"),
        },
    ),
    Entry(
        "accel.utils:PrepareForLaunch.__call__",
        RANKED,
        parameters={"index": P(REQUIRED, RANKED), "args": P(REQUIRED, RANKED)},
    ),
    Entry(
        "accel.utils:str_to_bool",
        TRUTH,
        parameters={"value": P(REQUIRED, TRUTH), "to_bool": P(False, TRUTH)},
    ),
    Entry(
        "accel.utils:parse_flag_from_env",
        DEFAULTS,
        parameters={"key": P(REQUIRED, DEFAULTS), "default": P(False, DEFAULTS)},
    ),
    Entry(
        "accel.utils:parse_choice_from_env",
        DEFAULTS,
        parameters={"key": P(REQUIRED, DEFAULTS), "default": P("no", DEFAULTS)},
    ),
    Entry(
        "accel.utils:get_int_from_env",
        NUMBERS,
        parameters={"env_keys": P(REQUIRED, NUMBERS), "default": P(REQUIRED, NUMBERS)},
    ),
    Entry(
        "accel.utils:patch_environment",
        PATCHED,
        NoOp.CONTEXT,
        parameters={"kwargs": P(REQUIRED, PATCHED)},
    ),
    Entry(
        "accel.utils:clear_environment",
        "test_variables_are_cleared_in_a_context",
        NoOp.CONTEXT,
    ),
    Entry(
        "accel.utils:purge_accelerate_environment",
        PURGED,
        NoOp.FIRST,
        parameters={"func_or_cls": P(REQUIRED, PURGED)},
    ),
    Entry(
        "accel.utils:write_basic_config",
        "test_the_machines_settings_are_those_of_the_public_package",
        parameters={
            "mixed_precision": P("no", "test_the_precision_is_written"),
            "save_location": P(None, "test_the_machines_settings_are_those_of_the_public_package"),
        },
    ),
    Entry(
        "accel.utils.environment:override_numa_affinity",
        IN_TURN,
        parameters={
            "local_process_index": P(REQUIRED, IN_TURN),
            "verbose": P(None, IN_TURN),
        },
    ),
    Entry(
        "accel.utils:set_numa_affinity",
        BOUND_ONCE,
        parameters={
            "local_process_index": P(REQUIRED, BOUND_ONCE),
            "verbose": P(None, BOUND_ONCE),
        },
    ),
    Entry(
        "accel.utils:merge_fsdp_weights",
        MERGED,
        parameters={
            "checkpoint_dir": P(REQUIRED, MERGED),
            "output_path": P(REQUIRED, MERGED),
            "safe_serialization": P(True, MERGED),
            "remove_checkpoint_dir": P(False, MERGED),
        },
    ),
]
