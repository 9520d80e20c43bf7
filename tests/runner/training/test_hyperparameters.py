"""C2: overrides of a resumed run take effect, or the run says why not."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.optim import lr_scheduler

from accel.config.handlers import GradScalerKwargs
from accel.machine.errors import ConfigError
from runner.builtin.schedules import cosine
from runner.data.datasets import Data
from runner.training.console import Display
from runner.training.hyperparameters import set_scaler
from tests.runner import loops
from tests.runner.loops import Points, newest, recipe_of, records

STOP = 7  # of 20 steps, 5 an epoch
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(**options: Any) -> Optimizer:
    return lambda model: torch.optim.AdamW(model.parameters(), **{"lr": 0.02, **options})


def sgd(**options: Any) -> Optimizer:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.02, **options})


def one_cycle(optimizer: Any, num_steps: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=num_steps + 1)


def annealed(optimizer: Any, num_steps: int) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps, eta_min=1e-4)


def in_sequence(optimizer: Any, num_steps: int) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def stepwise(size: int) -> Any:
    return lambda optimizer, num_steps: lr_scheduler.StepLR(optimizer, size, 0.5)


def resumed(
    folder: Path,
    first: dict[str, Any],
    then: dict[str, Any],
    changes: dict[str, Any] | None = None,
    stop_after: int = STOP,
) -> loops.Loop:
    """Stop a run after some steps, and return the loop that has gone on with it to the end."""
    loops.run(folder, recipe_of(trainer__stop_after=stop_after), **first)
    loop = loops.build(folder, recipe_of(**changes or {}), resume_from=newest(folder), **then)
    loop.run()
    return loop


def rates(folder: Path) -> list[float]:
    return [record["lr"] for record in records(folder)]


@pytest.mark.parametrize(
    "schedule",
    [None, loops.scheduler, cosine, annealed, in_sequence],
    ids=["none", "linear", "cosine", "annealed", "sequence"],
)
def test_a_new_rate_holds_from_the_next_step_on(tmp_path: Path, schedule: Any) -> None:
    made = {"make_scheduler": schedule}
    resumed(
        tmp_path / "a", {**made, "make_optimizer": adamw()}, {**made, "make_optimizer": adamw(lr=1)}
    )
    loops.run(tmp_path / "b", recipe_of(), **made, make_optimizer=adamw(lr=1))
    loops.run(tmp_path / "c", recipe_of(), **made, make_optimizer=adamw())
    assert rates(tmp_path / "a")[:STOP] == rates(tmp_path / "c")[:STOP]
    assert rates(tmp_path / "a")[STOP:] == pytest.approx(rates(tmp_path / "b")[STOP:], rel=1e-12)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (stepwise(2), stepwise(4)),
        (stepwise(2), None),
        (None, cosine),
        (cosine, one_cycle),
        (one_cycle, None),
        (loops.plateau, cosine),
    ],
    ids=["argument", "off", "on", "other", "momenta", "measured"],
)
def test_a_new_schedule_holds_from_the_next_step_on(tmp_path: Path, first: Any, then: Any) -> None:
    before = None if first is None else {"name": "first"}
    loops.run(
        tmp_path / "a",
        recipe_of(trainer__stop_after=STOP, scheduler=before),
        make_scheduler=first,
    )
    changes = {"scheduler": None if then is None else {"name": "another"}}
    loop = loops.build(
        tmp_path / "a",
        recipe_of(**changes),
        resume_from=newest(tmp_path / "a"),
        make_scheduler=then,
    )
    loop.run()
    other = loops.build(tmp_path / "b", recipe_of(**changes), make_scheduler=then)
    other.run()
    found, expected = (o.step.optimizers["optimizer"].param_groups for o in (loop, other))
    assert found[0]["betas"] == pytest.approx(expected[0]["betas"])
    assert rates(tmp_path / "a")[STOP:] == pytest.approx(rates(tmp_path / "b")[STOP:], rel=1e-12)


@pytest.mark.parametrize(
    ("first", "then", "changes"),
    [
        (loops.scheduler, loops.plateau, {"scheduler": {"name": "plateau"}}),
        (loops.plateau, loops.plateau, {"scheduler": {"name": "plateau", "patience": 7}}),
        (loops.plateau, loops.plateau, {"checkpoint__monitor": "count", "checkpoint__mode": "min"}),
    ],
    ids=["on", "options", "metric"],
)
def test_a_schedule_that_follows_measurements_is_not_changed(
    tmp_path: Path, first: Any, then: Any, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau with resume: a schedule"):
        resumed(tmp_path, {"make_scheduler": first}, {"make_scheduler": then}, changes)


def test_a_longer_run_follows_the_longer_schedule_at_once(tmp_path: Path) -> None:
    made = {"make_scheduler": annealed}
    resumed(tmp_path / "a", made, made, {"trainer__epochs": 8})
    loops.run(tmp_path / "b", recipe_of(trainer__epochs=8), **made)
    assert rates(tmp_path / "a")[STOP:] == pytest.approx(rates(tmp_path / "b")[STOP:], rel=1e-12)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adamw, {"weight_decay": 0.5}),
        (adamw, {"betas": (0.5, 0.6)}),
        (adamw, {"eps": 1e-2}),
        (sgd, {"momentum": 0.5}),
        (sgd, {"momentum": 0.5, "nesterov": True}),
    ],
)
def test_new_options_of_the_optimizer_are_used(
    tmp_path: Path, make: Callable[..., Optimizer], options: dict[str, Any]
) -> None:
    loop = resumed(tmp_path / "a", {"make_optimizer": make()}, {"make_optimizer": make(**options)})
    for group in loop.step.optimizers["optimizer"].param_groups:
        assert {name: group[name] for name in options} == options
    resumed(tmp_path / "b", {"make_optimizer": make()}, {"make_optimizer": make()})
    one, other = loops.losses(tmp_path / "a"), loops.losses(tmp_path / "b")
    assert one[: STOP + 1] == other[: STOP + 1]  # the loss of a step is that before its update
    assert one[STOP + 1 :] != other[STOP + 1 :]


def test_nothing_changes_where_nothing_was_overridden(tmp_path: Path) -> None:
    """Options that a schedule or an optimizer wrote itself are restored, not reset."""
    made = {"make_scheduler": one_cycle}
    resumed(tmp_path / "a", made, made)
    loops.run(tmp_path / "b", recipe_of(), **made)
    assert rates(tmp_path / "a") == rates(tmp_path / "b")
    assert loops.losses(tmp_path / "a") == loops.losses(tmp_path / "b")


def test_an_option_that_needs_other_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"amsgrad=True with resume.*amsgrad=False"):
        resumed(tmp_path, {"make_optimizer": adamw()}, {"make_optimizer": adamw(amsgrad=True)})


# -- data and measures ---------------------------------------------------------------------


def data(train: int = loops.NUM_TRAIN, validation: int = loops.NUM_VALIDATION) -> dict[str, Any]:
    return {"data": Data(Points(train), Points(validation), Points(9))}


def test_other_training_data_are_refused_within_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training data of 80 samples .* 16 samples into an"):
        resumed(tmp_path, data(), data(train=80))


def test_other_data_are_taken_from_the_end_of_an_epoch_on(tmp_path: Path) -> None:
    loop = resumed(tmp_path, data(), data(train=80), stop_after=10)
    assert loop.state.step == 10 + 2 * 10
    assert rates(tmp_path)[10] == pytest.approx(0.02 * (1 - 0.9 * 10 / 30))  # of 10 + 2 · 10 steps


@pytest.mark.parametrize(
    ("stop", "batch", "total"),
    [(10, 4, 10 + 2 * 10), (10, 16, 10 + 2 * 3), (14, 4, 14 + 2 + 10), (14, 16, 14 + 1 + 3)],
)
def test_a_schedule_ends_with_a_run_whose_epochs_have_another_length(
    tmp_path: Path, stop: int, batch: int, total: int
) -> None:
    made = {"make_scheduler": loops.scheduler}  # linear, to a tenth
    loop = resumed(tmp_path, made, made, {"trainer__global_batch_size": batch}, stop_after=stop)
    assert loop.state.step == loop.plan.total_steps == total
    assert rates(tmp_path)[stop:] == pytest.approx(
        [0.02 * (1 - 0.9 * step / total) for step in range(stop, total)]
    )


def test_the_best_of_another_measure_is_not_compared(tmp_path: Path) -> None:
    changes = {"checkpoint__monitor": "count", "checkpoint__mode": "min"}
    loop = resumed(tmp_path, {}, {}, changes)
    assert loop.state.best == loops.NUM_VALIDATION
    assert loop.state.best_step is not None
    assert loop.state.best_step > STOP


NODES = {"data": {"name": "points"}, "objective": {"name": "fit"}}


@pytest.mark.parametrize(
    ("changes", "anew"),
    [
        ({}, False),
        ({"trainer__epochs": 5}, False),
        ({"data": {"name": "points", "seed": 5}}, True),
        ({"objective": {"name": "fit", "scale": 100.0}}, True),
        ({"trainer__limit_eval_batches": 1}, True),
    ],
    ids=["same", "longer", "data", "objective", "limit"],
)
def test_the_best_by_other_data_or_another_objective_is_looked_for_anew(
    tmp_path: Path, changes: dict[str, Any], anew: bool
) -> None:
    """Values of another scale, or of other samples, are not compared with the best so far."""

    class Larger(loops.Fit):
        def summarize(self, values: Any) -> dict[str, float]:
            return {name: 100 * value for name, value in super().summarize(values).items()}

    loops.run(tmp_path, recipe_of(trainer__stop_after=STOP, **NODES))
    told = io.StringIO()
    loop = loops.build(
        tmp_path,
        recipe_of(**{**NODES, **changes}),
        resume_from=newest(tmp_path),
        objective=Larger(),
        display=Display(console=Console(file=told, width=300)),
    )
    loop.run()
    assert loop.remeasured is anew
    assert ("other options of data, objective" in told.getvalue()) is anew
    assert ((loop.state.best_step or 0) > STOP) is anew  # the larger values improve on nothing else


def test_constants_of_the_gradient_scaler_are_those_of_the_recipe() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_factor=2.0, growth_interval=2000)
    set_scaler(scaler, GradScalerKwargs(growth_factor=3.0, backoff_factor=0.25, growth_interval=7))
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 7
    set_scaler(None, GradScalerKwargs())


@pytest.mark.parametrize("after", [3, STOP])
def test_a_step_that_is_past_ends_nothing_and_is_refused(tmp_path: Path, after: int) -> None:
    changes = {"trainer__stop_after": after}
    with pytest.raises(ConfigError, match=rf"stop_after={after} with resume: the run is at step"):
        resumed(tmp_path, {}, {}, changes)
    assert len(records(tmp_path)) == STOP


# -- the mode of a schedule that follows a metric ------------------------------------------


@pytest.mark.parametrize(("mode", "of_run"), [("max", "min"), ("min", "max")])
def test_a_plateau_of_the_other_mode_is_refused(tmp_path: Path, mode: str, of_run: str) -> None:
    """C1: a contradiction is refused: improvements would cut the rate."""
    recipe = recipe_of(checkpoint__monitor="count", checkpoint__mode=of_run)
    with pytest.raises(ConfigError, match=f"scheduler mode={mode}.*checkpoint.mode={mode}"):
        loops.build(
            tmp_path,
            recipe,
            make_scheduler=lambda optimizer, num_steps: lr_scheduler.ReduceLROnPlateau(
                optimizer, mode
            ),
        )


def test_a_plateau_without_validation_data_is_refused(tmp_path: Path) -> None:
    """C1: as early stopping is."""
    with pytest.raises(ConfigError, match="ReduceLROnPlateau without validation data"):
        loops.build(tmp_path, recipe_of(), data=Data(Points(8)), make_scheduler=loops.plateau)
