"""R1, R3, R4, R8: where the loop ends, and what it measures, saves and writes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from accel.checkpoint.directory import checkpoints, read_manifest
from accel.config.handlers import ProfileKwargs
from accel.config.training import ProjectConfiguration
from accel.machine.errors import ConfigError
from runner.data.datasets import Data, make_order
from runner.recipe.schema import Checkpoint
from runner.training.checkpointing import best_checkpoint
from runner.training.loop import Loop
from runner.training.metrics import NonFiniteError
from runner.training.run import Callback
from tests.runner.loops import (
    NUM_TRAIN,
    NUM_VALIDATION,
    Exploding,
    Fit,
    Points,
    Spy,
    Stream,
    build,
    losses,
    newest,
    optimizer,
    recipe_of,
    records,
    run,
    weights,
)

# -- where it ends -------------------------------------------------------------------------


def test_a_run_of_some_epochs_ends_with_them(tmp_path: Path) -> None:
    spy = Spy()
    summary = run(tmp_path, recipe_of(trainer__epochs=2), callbacks={"spy": spy})
    assert (summary["stopped"], summary["step"], summary["epoch"]) == ("epochs", 10, 2)
    assert summary["samples"] == 2 * NUM_TRAIN
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert spy.steps("start") == [0]
    assert spy.steps("log") == list(range(1, 11))
    assert spy.calls == 10
    assert spy.steps("evaluate") == [5, 10, 10]
    assert spy.steps("checkpoint") == [5, 10]
    assert spy.steps("end") == [10]
    assert [record["epoch"] for record in records(tmp_path)] == [1] * 5 + [2] * 5
    assert [record["samples"] for record in records(tmp_path)] == list(range(8, 81, 8))


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_short_last_window_weighs_its_own_samples(
    micro_batch: int | None, tmp_path: Path
) -> None:
    """R1: each step is that of a plain loop over its samples, also the short one of an epoch."""
    recipe = recipe_of(trainer__epochs=2, trainer__micro_batch_size=micro_batch)
    data = Data(Points(NUM_TRAIN + 2), Points(NUM_VALIDATION))
    loop = build(tmp_path, recipe, data=data, make_scheduler=None)
    model = copy.deepcopy(loop.accelerator.unwrap_model(loop.step.models["model"]))
    loop.run()
    plain, expected = optimizer(model), []
    order = make_order(data.train, recipe.seed, recipe.dataloader)
    for epoch in range(2):
        order.set_epoch(epoch)
        indices = list(order)
        for start in range(0, NUM_TRAIN + 2, 8):
            batch = default_collate([data.train[i] for i in indices[start : start + 8]])
            loss = Fit().losses(model, batch).mean()
            loss.backward()
            plain.step()
            plain.zero_grad()
            expected.append(loss.item())
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)
    for name, tensor in weights(tmp_path).items():
        torch.testing.assert_close(tensor, model.state_dict()[name])


def test_max_steps_may_end_a_run_within_an_epoch(tmp_path: Path) -> None:
    summary = run(tmp_path, recipe_of(trainer__max_steps=7))
    assert (summary["stopped"], summary["step"], summary["epoch"]) == ("max_steps", 7, 2)
    assert [record["step"] for record in records(tmp_path, "validation")] == [5, 7]
    assert read_manifest(newest(tmp_path)).metadata["step"] == 7


def test_stop_after_ends_an_invocation_and_not_the_schedule(tmp_path: Path) -> None:
    summary = run(tmp_path / "cut", recipe_of(trainer__stop_after=3))
    assert (summary["stopped"], summary["step"]) == ("stop_after", 3)
    assert not summary["complete"]
    assert read_manifest(newest(tmp_path / "cut")).metadata["samples_in_epoch"] == 24
    assert records(tmp_path / "cut", "test") == []
    run(tmp_path / "whole", recipe_of())
    rates = [record["lr"] for record in records(tmp_path / "whole")]
    assert [record["lr"] for record in records(tmp_path / "cut")] == rates[:3]


def test_a_callback_may_end_a_run(tmp_path: Path) -> None:
    summary = run(tmp_path, recipe_of(), callbacks={"spy": Spy(stop_at=4)})
    assert (summary["stopped"], summary["reason"], summary["step"]) == ("callback", "enough", 4)
    assert summary["metrics"]["test"]["count"] == 9


def test_a_run_out_of_time_saves_and_says_so(tmp_path: Path) -> None:
    summary = run(tmp_path, recipe_of(trainer__max_time=1e-9))
    assert (summary["stopped"], summary["step"]) == ("max_time", 1)
    assert not summary["complete"]  # 19 steps of its schedule are left
    assert read_manifest(newest(tmp_path)).metadata["step"] == 1
    assert summary["metrics"]["validation"]["count"] == NUM_VALIDATION


# -- evaluations and log points ------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"loss=nan at step 3.*stop_on_nan=false"):
        run(tmp_path, recipe_of(trainer__log_every=4), objective=Exploding())


def test_or_is_counted(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__max_steps=4, trainer__log_every=4, trainer__stop_on_nan=False)
    data = Data(Points(NUM_TRAIN))
    run(tmp_path, recipe, objective=Exploding(), data=data)
    (record,) = records(tmp_path)
    assert record["loss_nonfinite"] == 2.0  # the third, and the fourth with the weights it left
    assert math.isfinite(record["loss"])


# -- checkpoints ---------------------------------------------------------------------------


def steps_saved(run_dir: Path) -> list[int]:
    return [read_manifest(p).metadata["step"] for p in checkpoints(run_dir / "checkpoints")]


def test_checkpoints_come_when_the_recipe_says(tmp_path: Path) -> None:
    project = ProjectConfiguration(automatic_checkpoint_naming=True)
    settings = Checkpoint(project=project, every_steps=4, every_epochs=2, keep_best=0)
    recipe = recipe_of(trainer__max_steps=14)
    recipe.checkpoint = settings
    run(tmp_path, recipe)
    assert steps_saved(tmp_path) == [4, 8, 10, 12, 14]
    metadata = read_manifest(newest(tmp_path)).metadata
    assert metadata["samples"] == 14 * 8
    assert (metadata["num_processes"], metadata["global_batch_size"]) == (1, 8)


class Worsening(Fit):
    """The first evaluation is the best."""

    def __init__(self) -> None:
        self.value = 0.0

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        self.value += 1.0
        return {**super().summarize(values), "loss": self.value}


def test_the_best_state_outlives_pruning_and_is_the_one_tested(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=6)  # keeps 3
    seen: list[torch.Tensor] = []

    class Look(Callback):
        def on_end(self, loop: Loop) -> None:
            seen.append(next(loop.step.models["model"].parameters()).detach().clone())

    summary = run(tmp_path, recipe, objective=Worsening(), callbacks={"look": Look()})
    assert steps_saved(tmp_path) == [5, 20, 25, 30]
    assert summary["best"]["step"] == 5
    known = read_manifest(newest(tmp_path)).metadata["best"]
    assert (known["step"], known["metric"]) == (5, "loss")
    from safetensors.torch import load_file

    folder = tmp_path / "checkpoints" / summary["best"]["checkpoint"]
    assert best_checkpoint(tmp_path / "checkpoints") == folder
    best = load_file(folder / "model.safetensors")
    assert torch.equal(seen[0], best["0.weight"])
    (tested,) = records(tmp_path, "test")
    assert (tested["step"], tested["weights_step"], summary["weights_step"]) == (30, 5, 5)


class StopAt(Callback):
    """Asks for a stop, as a signal does, at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, loop: Loop) -> None:
        if loop.state.step == self.step:
            loop.stop_flag.request("SIGTERM")


class Interrupting(Callback):
    """Asks for a stop before the evaluation of the last step."""

    def on_log(self, loop: Loop, values: Mapping[str, float]) -> None:
        if loop.complete:
            loop.stop_flag.request("SIGTERM")


def test_a_best_state_that_is_measured_after_a_resume_is_that_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    recipe = recipe_of(trainer__epochs=3, checkpoint__at_end=False)
    stopped = run(tmp_path, recipe, callbacks={"stop": StopAt(5)})
    assert (stopped["stopped"], stopped["step"]) == ("signal", 5)
    assert not records(tmp_path, "validation")  # left to the next invocation
    cut_off = newest(tmp_path).name
    summary = run(tmp_path, recipe, objective=Worsening(), resume_from=newest(tmp_path))
    known = read_manifest(newest(tmp_path)).metadata["best"]
    assert (known["step"], known["value"]) == (5, 1.0)
    assert (summary["best"]["step"], summary["best"]["checkpoint"]) == (5, cut_off)
    assert best_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / cut_off
    assert steps_saved(tmp_path) == [5, 10, 15]


def test_a_best_state_that_is_measured_after_the_last_step_is_saved_as_such(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=1)
    run(tmp_path, recipe, callbacks={"stop": Interrupting()})
    assert not records(tmp_path, "validation")
    summary = run(tmp_path, recipe, resume_from=newest(tmp_path))
    assert (summary["complete"], summary["best"]["step"]) == (True, 5)
    assert read_manifest(newest(tmp_path)).metadata["best"]["step"] == 5
    assert best_checkpoint(tmp_path / "checkpoints") == newest(tmp_path)


def test_a_resumed_run_knows_the_best_state(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=3, trainer__stop_after=10)
    run(tmp_path, recipe, objective=Worsening())
    recipe.trainer.stop_after = None
    objective = Worsening()
    objective.value = 2.0
    summary = run(tmp_path, recipe, objective=objective, resume_from=newest(tmp_path))
    assert (summary["best"]["step"], summary["best"]["value"]) == (5, 1.0)


# -- what else it writes -------------------------------------------------------------------


def test_a_stream_of_unknown_length_is_trained_on_epoch_by_epoch(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=2)
    data = Data(Stream(20), Points(NUM_VALIDATION))
    summary = run(tmp_path, recipe, data=data, make_scheduler=None)
    assert (summary["stopped"], summary["epoch"], summary["samples"]) == ("epochs", 2, 40)
    assert [record["step"] for record in records(tmp_path, "validation")] == [3, 6]
    with pytest.raises(ConfigError, match="schedule needs the number of steps"):
        run(tmp_path / "planned", recipe, data=data)


@pytest.mark.parametrize("folder", [None, "traces"])
def test_a_profile_lies_in_the_run_directory(tmp_path: Path, folder: str | None) -> None:
    schedule = {"wait": 1, "warmup": 1, "active": 1, "repeat": 1}
    profile = ProfileKwargs(schedule_option=schedule, output_trace_dir=folder)
    run(tmp_path, recipe_of(trainer__epochs=1, profile=profile))
    assert list((tmp_path / (folder or "profile")).iterdir())
