"""DeepSpeed's placeholders, wrappers and configuration (documentation page: DeepSpeed)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented, given, required

STEPPED = "test_what_prepare_returns_steps_and_drops_gradients"
ALONE = "test_stand_ins_cannot_step_alone"
AUTO = "test_auto_values_come_from_the_run"
FILLED = "test_stand_ins_fill_what_is_left_out_and_contradict_nothing"
SCHEDULE = "test_a_schedule_takes_from_its_stand_in_what_the_configuration_leaves_out"
ANSWERS = "test_a_configuration_answers_by_dotted_keys"
CHANGED = "test_libraries_fill_in_and_delete_by_dotted_keys"
A_FILE = "test_a_file_gives_its_path_to_messages"
ACTIVE = "test_the_active_one_of_a_state"
OPTIMIZER = "accel.utils:DeepSpeedOptimizerWrapper"
SCHEDULER = "accel.utils:DeepSpeedSchedulerWrapper"
CONFIGURATION = "accel.utils:HfDeepSpeedConfig"


def query(name: str, test: str) -> Entry:
    """Return the rows of a query of the configuration by dotted key."""
    return documented(f"{CONFIGURATION}.{name}", test, ds_key_long=REQUIRED)


PLACEHOLDERS = [
    Entry(
        "accel.utils:DummyOptim",
        FILLED,
        parameters={
            "params": P(REQUIRED, FILLED),
            **given(AUTO, lr=0.001, weight_decay=0),
            "kwargs": P(REQUIRED, FILLED, keyword=True),
        },
        attributes=dict.fromkeys(("params", "values", "defaulted"), FILLED),
    ),
    Entry("accel.utils:DummyOptim.step", ALONE),
    documented(
        "accel.utils:DummyScheduler",
        AUTO,
        optimizer=P(REQUIRED, ALONE),
        total_num_steps=None,
        warmup_num_steps=0,
        lr_scheduler_callable=P(None, STEPPED),
        kwargs=P(REQUIRED, SCHEDULE, keyword=True),
    ),
    Entry("accel.utils:DummyScheduler.step", ALONE),
    Entry("accel.utils:DummyScheduler.state_dict", ALONE),
    Entry("accel.utils:DummyScheduler.load_state_dict", ALONE),
]
PREPARED = [
    Entry(
        OPTIMIZER,
        STEPPED,
        parameters=required(STEPPED, "engine", "groups", "given"),
        attributes=dict.fromkeys(
            ("engine", "groups", "step_was_skipped", "trainable", "clipping", "window_ended"),
            STEPPED,
        ),
    ),
    documented(f"{OPTIMIZER}.step", STEPPED, closure=None),
    # set_to_none makes no difference, as the engine decides: no mutant would.
    Entry(f"{OPTIMIZER}.zero_grad", STEPPED),
    Entry(f"{OPTIMIZER}.add_param_group", STEPPED),
    documented(SCHEDULER, STEPPED, scheduler=REQUIRED, optimizers=REQUIRED),
]
QUERIES = [
    Entry(
        CONFIGURATION,
        ANSWERS,
        parameters=required(ANSWERS, "config_file_or_dict"),
        attributes={"config": CHANGED, "place": A_FILE},
    ),
    query("find_config_node", CHANGED),
    query("is_true", ANSWERS),
    query("is_false", ANSWERS),
    documented(f"{CONFIGURATION}.get_value", ANSWERS, ds_key_long=REQUIRED, default=None),
    documented(
        f"{CONFIGURATION}.del_config_sub_tree", CHANGED, ds_key_long=REQUIRED, must_exist=False
    ),
    *(Entry(f"{CONFIGURATION}.{name}", ANSWERS) for name in ("is_zero2", "is_zero3", "is_offload")),
    documented("accel.utils:get_active_deepspeed_plugin", ACTIVE, NoOp.FIRST, state=REQUIRED),
]

ENTRIES = [*PLACEHOLDERS, *PREPARED, *QUERIES]
