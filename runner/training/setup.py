"""Hand-over of a step's models, optimizers and schedules to the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accel.machine.errors import ConfigError
from accel.strategies.trainable_changes import Trainable

if TYPE_CHECKING:
    from accel import Accelerator
    from accel.config.handlers import ProfileKwargs
    from runner.training.run import Run
    from runner.training.step import Step


def prepare_models(accelerator: Accelerator, step: Step) -> None:
    """Prepare the models and optimizers of a step, in training mode."""
    for model in step.models.values():
        if not model.training:  # as `from_pretrained` of several libraries returns it
            model.train()
    prepared = accelerator.prepare(*step.models.values(), *step.optimizers.values())
    objects = iter(prepared if isinstance(prepared, (tuple, list)) else (prepared,))
    step.models = {name: next(objects) for name in step.models}
    step.optimizers = {name: next(objects) for name in step.optimizers}


def make_schedulers(step: Step, total_steps: int | None) -> Mapping[str, LRScheduler]:
    """Return the schedules of a step's optimizers, by name.

    Raises:
        ConfigError: if they need the number of steps, and that is not known.
    """
    # A stream without trainer.max_steps has no known end to plan a schedule for.
    schedulers = step.make_schedulers(total_steps or 1)
    if schedulers and total_steps is None:
        raise ConfigError.of(
            "trainer.max_steps=null with a data set of unknown length",
            "a learning-rate schedule needs the number of steps",
            "Set trainer.max_steps, or scheduler=null for a constant rate.",
        )
    return schedulers


def plateaus(loop: Run) -> dict[str, ReduceLROnPlateau]:
    """Return the schedules that follow the run's metric, in the mode in which it improves.

    Raises:
        ConfigError: if the run has no validation data, or the recipe gives another mode.
    """
    found = {n: one for n, one in loop.schedulers.items() if isinstance(one, ReduceLROnPlateau)}
    for name, scheduler in found.items():
        if not loop.data.sets("validation"):
            raise ConfigError.of(
                "scheduler ReduceLROnPlateau without validation data",
                "it follows a validation metric",
                "Give the data set a validation part, or choose another scheduler.",
            )
        if scheduler.mode == loop.mode:
            continue
        node = loop.recipe.scheduler
        # "max" is nobody's default; "min" counts as given only where the recipe says so.
        if scheduler.mode == "max" or (isinstance(node, Mapping) and "mode" in node):
            raise ConfigError.of(
                f"scheduler mode={scheduler.mode} of {name!r}",
                f"it follows {loop.monitor}, whose best is the {loop.mode}imum",
                f"Leave it out, or set checkpoint.mode={scheduler.mode}.",
            )
        worst = math.inf if loop.mode == "min" else -math.inf
        scheduler.load_state_dict({"mode": loop.mode, "best": worst})
    return found


def traces_below(handler: ProfileKwargs, run_dir: Path) -> ProfileKwargs:
    """Return a profiler's settings, whose traces go below the run directory."""
    if handler.output_trace_dir is None and handler.on_trace_ready is not None:
        return handler
    return replace(handler, output_trace_dir=str(run_dir / (handler.output_trace_dir or "profile")))


class TrainedLayers:
    """Wraps models again after their layers were frozen, unfrozen, added or replaced.

    `known` are the trainable parameters of each model, as it was wrapped.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.known = {name: Trainable(model) for name, model in run.step.models.items()}

    def follow(self) -> None:
        """Compare the models with the last call. Every process calls this between two steps."""
        models = self._run.step.models
        for name, known in self.known.items():
            if known.changed():
                models[name] = self._run.accelerator.prepare_model(models[name])
                self.known[name] = Trainable(models[name])
