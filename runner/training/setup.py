"""Preparation of a run: models, optimizers, loaders and schedules are handed to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accel.machine.errors import ConfigError
from accel.strategies.trainable_changes import Trainable
from runner.data.batches import EvalBatches, TrainBatches, eval_batches
from runner.training.checkpointing import RunState, Stateful
from runner.training.hyperparameters import Hyperparameters, follow_mode

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

    from runner.training.metrics import StepMeter
    from runner.training.run import Callback, Run

MOST_NAMES = 5  # of parameters, in a note


@dataclass(frozen=True)
class Prepared:
    """The prepared objects of a run; batches of evaluation by split, schedulers by optimizer name.

    `stepping` are (scheduler, optimizer) of those that step with their optimizer, `plateaus` the
    schedulers that step with a validation metric. `saved` is the state that checkpoints hold
    besides models and optimizers.
    """

    train_batches: TrainBatches
    eval_batches: dict[str, dict[str, EvalBatches]]
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
    sets = {
        split: eval_batches(accelerator, data, recipe, split) for split in ("validation", "test")
    }
    if recipe.checkpoint.monitor is not None and not sets["validation"]:
        raise ConfigError.of(
            f"checkpoint.monitor={recipe.checkpoint.monitor} without validation data",
            "it names a validation metric",
            "Give the data set a validation part, or leave the monitor out.",
        )
    monitored = (run.monitor, run.mode)
    hyperparameters = Hyperparameters(recipe, step, data, run.plan.total_steps, monitored)
    schedulers = _make_schedulers(run)
    plateaus = {name: s for name, s in schedulers.items() if isinstance(s, ReduceLROnPlateau)}
    for name, scheduler in plateaus.items():
        follow_mode(run, name, scheduler)
    hyperparameters.scheduled(step, schedulers)
    saved = _run_state(run, callbacks, meter, hyperparameters)
    accelerator.register_for_checkpointing(saved)
    return Prepared(
        train_batches,
        sets,
        hyperparameters,
        schedulers,
        stepping=[
            (scheduler, step.optimizers[name])
            for name, scheduler in schedulers.items()
            if name not in plateaus
        ],
        plateaus=list(plateaus.values()),
        saved=saved,
    )


class TrainedLayers:
    """Wraps models again after their layers were frozen, unfrozen, added or replaced.

    A note names trainable parameters that no optimizer has, once.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known = {name: Trainable(model) for name, model in run.step.models.items()}
        self._noted = False

    def follow(self) -> None:
        """Compare the models with the last call. Every process calls this between two steps."""
        step, accelerator = self._run.step, self._run.accelerator
        for name, known in self._known.items():
            if known.changed():
                step.models[name] = accelerator.prepare_model(step.models[name])
                self._known[name] = Trainable(step.models[name])
                if not accelerator.strategy.spec.owns_parameters:
                    self._note_unoptimized(accelerator.unwrap_model(step.models[name]))

    def _note_unoptimized(self, model: torch.nn.Module) -> None:
        groups = [g for one in self._run.step.optimizers.values() for g in one.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        names = [name for name, parameter in trained if id(parameter) not in held]
        if not names or self._noted:
            return
        self._noted = True
        shown = ", ".join(names[:MOST_NAMES]) + ", …" * (len(names) > MOST_NAMES)
        self._run.display.note(
            f"{shown}: trainable since step {self._run.state.step}, and no optimizer has them, so "
            "they stay as they are. Add them in the callback that unfreezes them: "
            "loop.step.optimizers[name].add_param_group({'params': layer.parameters()})."
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
    parts: dict[str, Stateful] = {"train": run.state, "meter": meter, "recipe": hyperparameters}
    parts |= {f"scheduler.{name}": part for name, part in hyperparameters.parts.items()}
    for name, callback in callbacks.items():
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            parts[f"callbacks.{name}"] = callback
    return RunState(parts)


def profiler(loop: Run) -> AbstractContextManager[profile | None]:
    """Return the context of a loop's profiler; its traces go below the run directory."""
    handler = loop.recipe.profile
    if handler is None:
        return nullcontext()
    if handler.output_trace_dir is not None or handler.on_trace_ready is None:
        folder = loop.run_dir / (handler.output_trace_dir or "profile")
        handler = replace(handler, output_trace_dir=str(folder))
    return loop.accelerator.profile(handler)
