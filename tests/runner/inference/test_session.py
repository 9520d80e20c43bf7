"""L1: `runner eval` and `runner predict` measure and use a trained run."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

import runner
from accel.machine.errors import CheckpointError, ConfigError
from runner import cli
from runner.builtin.digits import digits
from runner.data.datasets import Data
from runner.inference import predict, session
from runner.recipe import keys
from runner.recipe.batch_plan import plan_batches
from runner.recipe.schema import Recipe
from runner.runs.job import Job
from runner.training import build
from runner.training.step import SupervisedStep
from tests.runner.loops import Points, Stream
from tests.runner.trained_runs import make_run

NUM_TEST = 360


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), checkpoints=2, best=0)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def predictions(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_eval_measures_every_sample_of_the_best_state(run_dir: Path) -> None:
    found = session.evaluate(session.Request(run_dir))["metrics"]
    assert set(found) == {"validation", "test"}
    model, _ = runner.load(run_dir)
    images, labels = digits().test.tensors  # type: ignore[union-attr]
    with torch.no_grad():
        expected = (model(images).argmax(1) == labels).double().mean().item()
    assert found["test"]["accuracy"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("command", [("eval",), ("predict", "--output", "p.jsonl")])
def test_code_that_ends_the_process_is_no_success(
    command: tuple[str, ...],
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def leave(recipe: object) -> None:
        raise SystemExit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "build_data", leave)
    assert cli.main([*command, str(run_dir)]) == 1
    told = capsys.readouterr().err
    assert "SystemExit: 0" in told
    assert f'File "{__file__}", line ' in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override",
    [
        *("optimizer.lr=3", "scheduler=null", "trainer.epochs=3", "callbacks=[]", "fsdp=null"),
        *("trainer.accumulation.sync_each_batch=true", "dataloader.use_seedable_sampler=false"),
        *("dataloader.data_seed=3", "trainer.check_gradients=true", "trainer.overfit_batches=1"),
    ],
)
def test_what_only_training_reads_is_refused(
    override: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(run_dir), override]) == 2
    assert f"{override}: only training reads it" in capsys.readouterr().err


def test_what_only_training_reads_is_of_the_schema() -> None:
    known = {*keys.typed_keys(), *keys.nodes(Recipe)}
    assert set(session.ONLY_TRAINING) <= known


def test_overrides_change_the_recipe_that_is_measured(run_dir: Path) -> None:
    plain = session.evaluate(session.Request(run_dir, splits=("test",)))["metrics"]["test"]
    request = session.Request(
        run_dir, ("objective.label_smoothing=0.5", "trainer.eval_batch_size=7"), ("test",)
    )
    smoothed = session.evaluate(request)["metrics"]["test"]
    assert smoothed["loss"] != plain["loss"]
    assert smoothed["accuracy"] == plain["accuracy"]


def test_predict_writes_a_line_per_sample_in_order(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "predictions.jsonl"
    arguments = ["predict", str(run_dir), "--output", str(output), "trainer.eval_batch_size=50"]
    assert cli.main(arguments) == 0
    assert f"{NUM_TEST} predictions" in capsys.readouterr().out
    rows = predictions(output)
    assert [row["index"] for row in rows] == list(range(NUM_TEST))
    model, _ = runner.load(run_dir)
    images, _ = digits().test.tensors  # type: ignore[union-attr]
    with torch.no_grad():
        expected = model(images).argmax(1).tolist()
    assert [row["prediction"] for row in rows] == expected


def test_any_number_of_processes_measures(tmp_path: Path) -> None:
    """Three were refused by the batch of training, 16, which nothing is trained with."""
    run_dir = make_run(tmp_path, "trainer.global_batch_size=16", "trainer.micro_batch_size=8")
    _, recipe = Job.load(run_dir)
    found = session.for_inference(recipe, session.Request(run_dir, num_processes=3))
    plan = plan_batches(found.trainer, 3, None)
    assert plan.eval_batch == 16


def test_a_run_of_several_processes_is_used_in_one(tmp_path: Path) -> None:
    two = ("distributed=multi_cpu", "distributed.num_processes=2", "parallelism.cp_size=2")
    run_dir = make_run(tmp_path, *two)
    found = session.evaluate(session.Request(run_dir, splits=("test",)))
    assert found["metrics"]["test"]["loss"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.eval_bach_size=3"], "trainer.eval_batch_size"),
        (["trainer.eval_batch_size=-1"], "at least 1"),
        (["distributed=multi_cpu"], "one process"),
    ],
)
def test_refusals_are_those_of_a_run(
    run_dir: Path, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(run_dir), *overrides]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_the_weights_do_not_fit_is_refused(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="do not fit the model 'model'"):
        session.evaluate(session.Request(run_dir, ("model.width=16",)))


def test_what_is_not_there_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(tmp_path)]) == 2
    assert "a run directory holds sessions" in capsys.readouterr().err
    nowhere = tmp_path / "no" / "where.jsonl"
    assert cli.main(["predict", str(run_dir), "--output", str(nowhere)]) == 2
    assert "a folder that exists" in capsys.readouterr().err


class Predicting(SupervisedStep):
    """A step that predicts for half of the samples."""

    def predict(self, batch: Any) -> Any:
        return batch[1][::2]


@pytest.mark.parametrize("before", [True, False], ids=["over", "new"])
def test_predict_refuses_what_is_not_per_sample_and_leaves_nothing(
    before: bool,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, "build_step", functools.partial(with_class, build.build_step))
    output = tmp_path / "p.jsonl"
    if before:
        output.write_text("old")
    assert cli.main(["predict", str(run_dir), "--output", str(output)]) == 2
    assert "Predicting.predict returned" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"] * before


def with_class(build_step: Any, *given: Any) -> Any:
    step = build_step(*given)
    step.__class__ = Predicting
    return step


def test_a_stream_is_predicted_row_by_row_and_counted(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length that a stream claims is held against what it gives."""

    class Claiming(Stream):
        def __iter__(self) -> Any:
            images, labels = digits().test.tensors  # type: ignore[union-attr]
            return iter(list(zip(images, labels, strict=True))[:7])

    class Counted(Claiming):
        def __len__(self) -> int:
            return 9

    request = session.Request(
        run_dir, ("trainer.eval_batch_size=3",), ("test",), output=tmp_path / "p.jsonl"
    )
    monkeypatch.setattr(build, "build_data", lambda recipe: Data(Points(3), test=Claiming(7)))
    assert predict.write_predictions(request) == 7
    assert len(predictions(tmp_path / "p.jsonl")) == 7
    monkeypatch.setattr(build, "build_data", lambda recipe: Data(Points(3), test=Counted(7)))
    with pytest.raises(ConfigError, match="predict returned 7 rows: the data set has 9 samples"):
        predict.write_predictions(request)


def test_named_sets_are_measured_and_predicted_by_name(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = digits()
    halves = {name: Subset(found.test, range(n)) for name, n in (("few", 3), ("many", 50))}
    monkeypatch.setattr(build, "build_data", lambda recipe: Data(found.train, test=halves))
    measured = session.evaluate(session.Request(run_dir))["metrics"]["test"]
    assert measured.keys() == {"few/loss", "few/accuracy", "many/loss", "many/accuracy"}
    output = tmp_path / "p.jsonl"
    assert predict.write_predictions(session.Request(run_dir, output=output)) == 53
    rows = predictions(output)
    assert [row["set"] for row in rows] == ["few"] * 3 + ["many"] * 50
    assert [row["prediction"] for row in rows[:3]] == [row["prediction"] for row in rows[3:6]]
