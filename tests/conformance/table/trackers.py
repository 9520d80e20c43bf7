"""Experiment trackers (documentation page: Experiment Trackers)."""

from __future__ import annotations

from collections.abc import Mapping

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented, given, required

EVERY = "test_every_tracker_is_one_of_the_documented_words"
REGISTERED = "test_a_registered_class_is_chosen_by_its_name"
BOARD = "test_tensorboard_gets_scalars_text_images_and_hyper_parameters"
LOG = given("", values=REQUIRED, step=None)
TABLES = given("", table_name=REQUIRED, columns=None, data=None, dataframe=None, step=None)
NAMED = required("", "run_name")
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
        given("", run_name=None),
        {"log_images": LOG, "log_table": TABLES},
    ),
    "MLflowTracker": (
        "test_mlflow",
        given(
            "",
            experiment_name=None,
            logging_dir=None,
            run_id=None,
            tags=None,
            nested_run=False,
            run_name=None,
            description=None,
        ),
        {
            "log_artifact": given("", local_path=REQUIRED, artifact_path=None),
            "log_artifacts": given("", local_dir=REQUIRED, artifact_path=None),
            "log_figure": required("", "figure", "artifact_file"),
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
    methods = {"store_init_configuration": required("", "values"), "log": LOG, **own}
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
    documented(
        "accel.tracking:register_tracker_class", REGISTERED, NoOp.FIRST, tracker_class=REQUIRED
    ),
]
