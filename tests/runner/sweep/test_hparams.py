"""HParams are read back as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS

from runner.recipe.schema import Recipe
from runner.sweep import directory, hparams, table
from tests.runner.sweep.test_directory import described


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def content(found: EventAccumulator, tag: str) -> Any:
    data = found.PluginTagToContent(metadata.PLUGIN_NAME)[tag]
    return metadata._parse_plugin_data_as(
        data, {"E": "experiment", "S": "session_start_info", "F": "session_end_info"}[KINDS[tag]]
    )


KINDS = {
    metadata.EXPERIMENT_TAG: "E",
    metadata.SESSION_START_INFO_TAG: "S",
    metadata.SESSION_END_INFO_TAG: "F",
}


def test_each_job_is_a_session_group_with_values_and_metrics(tmp_path: Path) -> None:
    made = directory.create(str(tmp_path / "sweep"), Recipe(), described(1, 2, 3))
    metrics = {"validation": {"loss": 0.7, "accuracy": 0.25}, "test": {"loss": 0.6}}
    for job, code in ((0, 0), (1, 1)):
        attempt = made.journal.started(job, [f"seed={job + 1}"])
        best = {"validation": {"step": 7, "metrics": {"loss": 0.5, "accuracy": 0.75}}}
        measured = {**best, "test": {"step": 9, "metrics": {"loss": 0.6}}}
        more: dict[str, Any] = {"metrics": metrics, "measured": measured, "step": 9}
        more = more | {"best_step": 7, "objective": 0.5} if code == 0 else {}
        made.journal.ended(job, attempt, [f"seed={job + 1}"], code, **more)
    found = table.results(made, made.journal.states())
    for _ in range(2):  # writing again replaces
        hparams.write(made.path, found, [0, 1, 2])
    root = made.path / "tensorboard"
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["0000", "0001"]
    experiment = content(events(root), metadata.EXPERIMENT_TAG)
    assert [one.name for one in experiment.hparam_infos] == ["seed"]
    tags = [one.name.tag for one in experiment.metric_infos]
    assert tags == ["objective", "validation/loss", "validation/accuracy", "test/loss"]
    first, second = events(root / "0000"), events(root / "0001")
    start = content(first, metadata.SESSION_START_INFO_TAG)
    assert start.group_name == "0000"
    assert start.hparams["seed"].number_value == 1
    assert content(first, metadata.SESSION_END_INFO_TAG).status == STATUS_SUCCESS
    assert content(second, metadata.SESSION_END_INFO_TAG).status == STATUS_FAILURE
    assert {tag: first.Scalars(tag)[0].value for tag in tags[:3]} == {
        "objective": 0.5,
        "validation/loss": 0.5,
        "validation/accuracy": 0.75,
    }
    assert [first.Scalars(tag)[0].step for tag in tags] == [7, 7, 7, 9]


def test_a_journal_of_an_earlier_version_has_the_last_values(tmp_path: Path) -> None:
    made = directory.create(str(tmp_path / "sweep"), Recipe(), described(1))
    attempt = made.journal.started(0, ["seed=1"])
    more = {"metrics": {"validation": {"loss": 0.7}}, "step": 9, "best_step": 7}
    made.journal.ended(0, attempt, ["seed=1"], 0, objective=0.5, **more)  # type: ignore[arg-type]
    hparams.write(made.path, table.results(made, made.journal.states()), [0])
    found = events(made.path / "tensorboard" / "0000")
    assert found.Scalars("validation/loss")[0].step == 9
    assert found.Scalars("objective")[0].step == 7


def test_values_have_the_types_that_hparams_know() -> None:
    assert [hparams._typed(value) for value in ("1e-3", "true", "cosine")] == [
        0.001,
        True,
        "cosine",
    ]


def test_jobs_of_a_command_that_was_killed_are_written_by_the_next(tmp_path: Path) -> None:
    made = directory.create(str(tmp_path / "sweep"), Recipe(), described(1, 2, 3))
    for job in (0, 1):
        attempt = made.journal.started(job, [f"seed={job + 1}"])
        made.journal.ended(job, attempt, [f"seed={job + 1}"], 0, objective=0.5)
    hparams.write(made.path, table.results(made, made.journal.states()), [1])
    root = made.path / "tensorboard"
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["0000", "0001"]
    before = sorted((root / "0000").iterdir())
    hparams.write(made.path, table.results(made, made.journal.states()), [])
    assert sorted((root / "0000").iterdir()) == before  # what is there is not written again
    assert sorted(path.name for path in made.path.iterdir()) == [
        "journal.jsonl",
        "sweep.json",
        "tensorboard",
    ]


def test_nothing_is_written_where_nothing_has_ended(tmp_path: Path) -> None:
    made = directory.create(str(tmp_path / "sweep"), Recipe(), described(1))
    hparams.write(made.path, table.results(made, {}), [0])
    assert not (made.path / "tensorboard").exists()
