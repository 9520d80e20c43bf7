"""Preparation of a run: models, optimizers, loaders and schedules are handed to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accel.machine.errors import ConfigError
from runner.data.train_eval_batches import EvalBatches, TrainBatches
from runner.training.checkpointing import OWN, RunState, Stateful
from runner.training.saved_hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from runner.training.callback import Callback
    from runner.training.current_run import Run
    from runner.training.metrics import StepMeter


@dataclass(frozen=True)
class Prepared:
    """The prepared objects of a run; batches of evaluation by split, schedulers by optimizer name.

    `stepping` are (scheduler, optimizer) of those that step with their optimizer, `plateaus` the
    schedulers that step with a validation metric. `saved` is the state that checkpoints hold
    besides models and optimizers.
    """

    train_batches: TrainBatches
    eval_batches: dict[str, EvalBatches]
    hyperparameters: Hyperparameters
    schedulers: Mapping[str, LRScheduler]
    stepping: list[tuple[LRScheduler, Any]]
    plateaus: list[ReduceLROnPlateau]
    saved: RunState


def prepare(run: Run, callbacks: Mapping[str, Callback], meter: StepMeter) -> Prepared:
    """Prepare the objects of a run, and register its state for checkpoints.

    Raises:
        ConfigError: if the data or the schedule do not fit the recipe.
    """
    step, accelerator, recipe, data = run.step, run.accelerator, run.recipe, run.data
    _prepare_models(run)
    train_batches = TrainBatches(accelerator, data, recipe, run.plan)
    eval_batches = {
        split: EvalBatches(accelerator, dataset, recipe, data.collate_fn, split)
        for split, dataset in (("validation", data.validation), ("test", data.test))
        if dataset is not None
    }
    monitored = (run.monitor, run.mode)
    hyperparameters = Hyperparameters(recipe, step, data, run.plan.total_steps, monitored)
    schedulers = _make_schedulers(run)
    hyperparameters.scheduled(step, schedulers)
    saved = _run_state(run, callbacks, meter, hyperparameters)
    accelerator.register_for_checkpointing(saved)
    return Prepared(
        train_batches,
        eval_batches,
        hyperparameters,
        schedulers,
        stepping=[
            (scheduler, step.optimizers[name])
            for name, scheduler in schedulers.items()
            if not isinstance(scheduler, ReduceLROnPlateau)
        ],
        plateaus=[s for s in schedulers.values() if isinstance(s, ReduceLROnPlateau)],
        saved=saved,
    )


def _prepare_models(run: Run) -> None:
    step = run.step
    for model in step.models.values():
        if not model.training:  # as `from_pretrained` of several libraries returns it
            model.train()
    prepared = run.accelerator.prepare(*step.models.values(), *step.optimizers.values())
    objects = iter(prepared if isinstance(prepared, (tuple, list)) else (prepared,))
    step.models = {name: next(objects) for name in step.models}
    step.optimizers = {name: next(objects) for name in step.optimizers}


def _make_schedulers(run: Run) -> Mapping[str, LRScheduler]:
    total = run.plan.total_steps
    # A stream without trainer.max_steps has no known end to plan a schedule for.
    schedulers = run.step.make_schedulers(total or 1)
    if schedulers and total is None:
        raise ConfigError.of(
            "trainer.max_steps=null with a data set of unknown length",
            "a learning-rate schedule needs the number of steps",
            "Set trainer.max_steps, or scheduler=null for a constant rate.",
        )
    return schedulers


def _run_state(
    run: Run,
    callbacks: Mapping[str, Callback],
    meter: StepMeter,
    hyperparameters: Hyperparameters,
) -> RunState:
    parts: dict[str, Stateful] = {"train": run.state, "meter": meter, OWN: hyperparameters}
    parts |= {f"scheduler.{name}": part for name, part in hyperparameters.parts.items()}
    for name, callback in callbacks.items():
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            parts[f"callbacks.{name}"] = callback
    return RunState(parts)
