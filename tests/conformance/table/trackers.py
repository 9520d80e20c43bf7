"""Experiment trackers (documentation page: Experiment Trackers)."""

from __future__ import annotations

from collections.abc import Mapping

from tests.conformance.rows import REQUIRED, Entry, NoOp, P

EVERY = "test_every_tracker_is_one_of_the_documented_words"
REGISTERED = "test_a_registered_class_is_chosen_by_its_name"
BOARD = "test_tensorboard_gets_scalars_text_images_and_hyper_parameters"
LOG = {"values": P(REQUIRED, ""), "step": P(None, "")}
TABLES = {
    "table_name": P(REQUIRED, ""),
    "columns": P(None, ""),
    "data": P(None, ""),
    "dataframe": P(None, ""),
    "step": P(None, ""),
}
NAMED = {"run_name": P(REQUIRED, "")}
# Parameters of the constructor, and the methods besides those of every tracker.
TRACKERS: dict[str, tuple[str, Mapping[str, P], Mapping[str, Mapping[str, P]]]] = {
    "TensorBoardTracker": (
        BOARD,
        {**NAMED, "logging_dir": P(REQUIRED, "")},
        {"log_images": LOG},
    ),
    "WandBTracker": ("test_wandb", NAMED, {"log_images": LOG, "log_table": TABLES}),
    "CometMLTracker": ("test_comet", NAMED, {}),
    "AimTracker": (
        "test_aim",
        {**NAMED, "logging_dir": P(".", "")},
        {"log_images": {**LOG, "kwargs": P(None, "")}},
    ),
    "ClearMLTracker": (
        "test_clearml",
        {"run_name": P(None, "")},
        {"log_images": LOG, "log_table": TABLES},
    ),
    "MLflowTracker": (
        "test_mlflow",
        {
            "experiment_name": P(None, ""),
            "logging_dir": P(None, ""),
            "run_id": P(None, ""),
            "tags": P(None, ""),
            "nested_run": P(False, ""),
            "run_name": P(None, ""),
            "description": P(None, ""),
        },
        {
            "log_artifact": {"local_path": P(REQUIRED, ""), "artifact_path": P(None, "")},
            "log_artifacts": {"local_dir": P(REQUIRED, ""), "artifact_path": P(None, "")},
            "log_figure": {"figure": P(REQUIRED, ""), "artifact_file": P(REQUIRED, "")},
        },
    ),
    "SwanLabTracker": ("test_swanlab", NAMED, {"log_images": LOG}),
    "TrackioTracker": ("test_trackio", NAMED, {}),
}


def _tested(parameters: Mapping[str, P], test: str) -> dict[str, P]:
    return {name: P(parameter.default, test) for name, parameter in parameters.items()}


def _of(name: str) -> list[Entry]:
    test, parameters, own = TRACKERS[name]
    kind = f"accel.tracking:{name}"
    methods = {"store_init_configuration": {"values": P(REQUIRED, "")}, "log": LOG, **own}
    attributes = dict.fromkeys(("name", "requires_logging_directory", "main_process_only"), EVERY)
    return [
        Entry(
            kind,
            test,
            parameters=_tested(parameters, test),
            attributes={**attributes, "tracker": test},
        ),
        *(Entry(f"{kind}.{m}", test, parameters=_tested(p, test)) for m, p in methods.items()),
    ]


ENTRIES = [
    *(entry for name in TRACKERS for entry in _of(name)),
    Entry(
        "accel.tracking:register_tracker_class",
        REGISTERED,
        NoOp.FIRST,
        {"tracker_class": P(REQUIRED, REGISTERED)},
    ),
]
