"""A run under way, as its callbacks and reports see it; the events that callbacks may answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.checkpoint import directory
from accel.comm.rng import preserved
from accel.machine.errors import ConfigError
from runner.recipe.batch_plan import BatchPlan, Position, plan_batches
from runner.recipe.units import parse_duration
from runner.training import base_weights, media
from runner.training.checkpointing import Saver
from runner.training.console import Display
from runner.training.speed import Speed
from runner.training.state import Stop, Stopwatch, TrainState
from runner.training.stopping import StopFlag

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from accel import Accelerator
    from runner.data.datasets import Data
    from runner.recipe.schema import Recipe
    from runner.training.step import Step


@dataclass(eq=False)
class Run:
    """A run under way; `runner.training.loop.Loop` trains it.

    Args:
        recipe: the run's recipe.
        run_dir: its directory.
        accelerator: the engine.
        step: owns the models and optimizers, which are not prepared yet.
        data: the data sets.
        callbacks: by name.
        resume_from: the checkpoint that training is resumed from; None: from the beginning.
        stop_flag: requests to stop, and how far this process has come.
        on_begin: called on every process once the state is loaded and the first step is made, or
            none is to be made; before that, nothing of the run directory changes.

    Attributes:
        display: prints notes and tables, on rank 0.
        plan: batch sizes, accumulation steps and the number of steps.
        state: step, epoch and sample counters.
        stopped: why training ended; None before.
        monitor: metric by which states are compared.
        mode: whether its best is the "max" or the "min".
        metrics: the last evaluation of each split, by metric.
        weights_step: the step whose weights were tested; None: there was no test yet.
        remeasured: whether a resume changed the data or the objective that evaluations measure by.
        results: entries that callbacks add to summary.json.
        values: by name, what callbacks add to the next log point.
        rows: (label, text) that callbacks add to the final table.
        schedulers: learning-rate schedulers, by the name of their optimizer.
        saver: writes checkpoints, and knows the best and the last.
        watch: measures the time spent on each phase.
        speed: measures steps, their operations and the ranks.
        deadline: value of `time.monotonic` at which time is up; None: never.
        num_parameters: parameters of all models: (all, trainable).
        base: the files of weights that checkpoints leave out, by model.
    """

    recipe: Recipe
    run_dir: Path
    accelerator: Accelerator
    step: Step
    data: Data
    callbacks: Mapping[str, Callback] = field(default_factory=dict)
    resume_from: str | None = None
    stop_flag: StopFlag = field(default_factory=StopFlag)
    on_begin: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        recipe, accelerator, step = self.recipe, self.accelerator, self.step
        self.display = Display(enabled=accelerator.is_main_process)
        self.plan = self._plan()
        self.state = TrainState()
        self.stopped: Stop | None = None
        self.monitor = recipe.checkpoint.monitor or step.monitor
        self.mode = recipe.checkpoint.mode or step.mode
        self.metrics: dict[str, dict[str, float]] = {}
        self.weights_step: int | None = None
        self.remeasured = False
        self.results: dict[str, object] = {}
        self.values: dict[str, float] = {}
        self.rows: list[tuple[str, str]] = []
        self.schedulers: Mapping[str, LRScheduler] = {}
        self.watch = Stopwatch()
        self.speed = Speed(accelerator, self.watch)
        max_time = parse_duration(recipe.trainer.max_time)
        self.deadline = None if max_time is None else time.monotonic() + max_time
        self._samples_before, self._seconds_before = 0, 0.0
        self.num_parameters = count_parameters(accelerator, step.models)
        self.base = base_weights.begin(accelerator, step.models, self.resume_from)
        self.saver = Saver(accelerator, recipe.checkpoint, self.state, self.run_dir)

    def _plan(self) -> BatchPlan:
        """Return the batch plan; a resumed run's begins at the position of its checkpoint."""
        position = None
        if self.resume_from is not None:
            recorded = directory.read_manifest(self.resume_from).metadata
            names = ("step", "epoch", "samples_in_epoch")
            position = Position(*(recorded.get(name, 0) for name in names))
        size, dp_size = self.data.num_train_samples, self.accelerator.parallel_dims.dp_size
        return plan_batches(self.recipe.trainer, dp_size, size, position)

    @property
    def complete(self) -> bool:
        """Whether the run has reached its end, and is not only interrupted."""
        return self.stopped is not None and self.stopped.complete

    @property
    def seconds(self) -> float:
        """Time spent on the run in seconds, over all invocations."""
        return self._seconds_before + self.watch.elapsed

    @property
    def samples_here(self) -> int:
        """Samples trained on in this invocation, over all processes."""
        return self.state.samples - self._samples_before

    def require_validation(self, value: str) -> None:
        """Raise a ConfigError about `value`, which follows a metric, if none is measured."""
        if not self.data.sets("validation") or not self.recipe.trainer.evaluate:
            rule = "it follows a validation metric"
            remedy = "Give validation data, with trainer.evaluate=true, or leave it out."
            raise ConfigError.of(f"{value} without validation data", rule, remedy)

    def stop(self, reason: str, kind: str = "callback") -> None:
        """End training at this step boundary. Every process must call this together.

        Args:
            reason: one sentence, for the summary.
            kind: `stopped` of the summary.
        """
        if self.stopped is None:
            self.stopped = Stop(kind, reason)
            self.stop_flag.progress.ending = f"after step {self.state.step} ({reason})"

    def log_media(self, name: str, value: Any) -> None:
        """Show a value of this step in trackers and reports, as a file ``media/<step>/<name>.*``.

        Args:
            name: unique within the step.
            value: text; a figure of matplotlib; an image, [H, W], [H, W, C] or [C, H, W] (floats in
                [0, 1] or bytes) or PIL's; rows of a table as mappings; or values [N], as histogram.

        Raises:
            ConfigError: for any other kind.
        """
        media.log_media(self.accelerator, self.run_dir, self.state.step, name, value)

    def logs_at(self, step: int) -> bool:
        """Return whether an optimizer step is a log point."""
        return step % self.recipe.trainer.log_every == 0 or step == self.plan.total_steps

    def notify(self, event: str, *values: object) -> None:
        """Call `event` of the callbacks that define it, with the random generators preserved."""
        for callback in self.answering(event):
            with preserved(), self.watch.paused("callbacks"):
                getattr(callback, event)(self, *values)

    def answering(self, event: str) -> list[Callback]:
        """Return the callbacks that define `event`."""
        ours = getattr(Callback, event)
        return [c for c in self.callbacks.values() if getattr(type(c), event) is not ours]


def count_parameters(
    accelerator: Accelerator, models: Mapping[str, torch.nn.Module]
) -> tuple[int, int]:
    """Return (all, trainable) parameters of several models; shared ones count once."""
    size = accelerator.strategy.state.num_elements
    found = {id(p): p for model in models.values() for p in model.parameters()}.values()
    return sum(map(size, found)), sum(size(p) for p in found if p.requires_grad)


class Callback:
    """Base of callbacks; every method does nothing by default and runs on every rank.

    Registered with ``@register.callback(name)``. A callback with `state_dict` and `load_state_dict`
    is saved in checkpoints. `loop.stop(reason)` ends training at the next step boundary; every
    process must call it at the same step. Random draws in an event do not affect training. Only in
    `on_step`, which is called too often to restore the generators, they would: it must not draw.

    An event may freeze and unfreeze layers, on all ranks alike: models are prepared again before
    the next step. An optimizer that lacks unfrozen parameters gets them by `add_param_group`.
    """

    def on_sanity_check(self, loop: Run, metrics: Mapping[str, float]) -> None:
        """Check the metrics of the short evaluation before the first step of a new run.

        Raise here what would fail after an evaluation, such as a metric that is not measured.
        """

    def on_setup(self, loop: Run) -> None:
        """With models and optimizers built, before the engine prepares them."""

    def on_start(self, loop: Run) -> None:
        """Before the first step, after a resume."""

    def on_epoch_start(self, loop: Run) -> None:
        """Before the first step of an epoch; not where a resume continues within one."""

    def on_before_optimizer_step(self, loop: Run) -> None:
        """Before each optimizer step, after clipping. Must not wait for the device."""

    def on_step(self, loop: Run) -> None:
        """After each optimizer step. Must not wait for the device."""

    def on_epoch_end(self, loop: Run) -> None:
        """After the last step of an epoch, before its evaluation and checkpoint."""

    def on_log(self, loop: Run, values: Mapping[str, float]) -> None:
        """At a log point, with the values that were read."""

    def on_evaluation_start(self, loop: Run, split: str) -> None:
        """Before an evaluation of `split`; weights may be exchanged until `on_evaluation_end`."""

    def on_evaluation_end(self, loop: Run, split: str) -> None:
        """After an evaluation of `split`, also one that failed or was interrupted."""

    def on_evaluate(self, loop: Run, split: str, metrics: Mapping[str, float]) -> None:
        """After an evaluation of `split` ("validation", "test")."""

    def on_save_start(self, loop: Run) -> None:
        """Before a checkpoint is written; weights may be exchanged until `on_save_end`."""

    def on_save_end(self, loop: Run) -> None:
        """After a checkpoint was written, also where that failed."""

    def on_checkpoint(self, loop: Run, path: str) -> None:
        """After a checkpoint was committed."""

    def on_exception(self, loop: Run, error: Exception) -> None:
        """After an error that ends the run, on the ranks that met it. Must not wait for others."""

    def on_end(self, loop: Run) -> None:
        """After the last evaluation; on rank 0 before the final table is shown."""
