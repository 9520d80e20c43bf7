"""A run under way, as its callbacks and reports see it; the events that callbacks may answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accel.checkpoint import directory
from runner.data.datasets import num_samples
from runner.recipe.batch_plan import BatchPlan, Position, plan_batches
from runner.recipe.units import parse_duration
from runner.training.checkpointing import Saver
from runner.training.console import Display
from runner.training.state import Stop, TrainState
from runner.training.stopping import TIME_IS_UP, StopFlag

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from accel import Accelerator
    from runner.data.datasets import Data
    from runner.recipe.schema import Recipe
    from runner.training.step import Step


class Run:
    """A run under way; `runner.training.loop.Loop` trains it.

    Attributes:
        recipe: the run's recipe.
        run_dir: its directory.
        accelerator: the engine.
        step: owns the models and optimizers.
        data: the data sets.
        plan: batch sizes, accumulation steps and the number of steps.
        resume_from: the checkpoint that training was resumed from; None: from the beginning.
        state: step, epoch and sample counters.
        stop_flag: requests to stop, and how far this process has come.
        stopped: why training ended; None before.
        monitor: metric by which states are compared.
        mode: whether its best is the "max" or the "min".
        metrics: the last evaluation of each split, by metric.
        weights_step: the step whose weights were tested; None: there was no test yet.
        remeasured: whether a resume changed the data or the objective that evaluations measure by.
        results: entries that callbacks add to summary.json.
        rows: (label, text) that callbacks add to the final table.
        schedulers: learning-rate schedulers, by the name of their optimizer.
        saver: writes checkpoints, and knows the best and the last.
        display: prints notes and tables, on rank 0.
        watch: measures the time spent on training.
        deadline: value of `time.monotonic` at which time is up; None: never.
        num_parameters: parameters of all models: (all, trainable).
        model_names: class names of the models.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: str | Path,
        accelerator: Accelerator,
        step: Step,
        data: Data,
        *,
        resume_from: str | Path | None = None,
        stop_flag: StopFlag | None = None,
        display: Display | None = None,
    ) -> None:
        self.recipe = recipe
        self.run_dir = Path(run_dir)
        self.accelerator = accelerator
        self.step = step
        self.data = data
        self.resume_from = None if resume_from is None else str(resume_from)
        self.plan = self._plan()
        self.state = TrainState()
        self.stop_flag = stop_flag or StopFlag()
        self.stopped: Stop | None = None
        self.monitor = recipe.checkpoint.monitor or step.monitor
        self.mode = recipe.checkpoint.mode or step.mode
        self.metrics: dict[str, dict[str, float]] = {}
        self.weights_step: int | None = None
        self.remeasured = False
        self.results: dict[str, object] = {}
        self.rows: list[tuple[str, str]] = []
        self.schedulers: Mapping[str, LRScheduler] = {}
        folder = Path(accelerator.project_dir or self.run_dir) / directory.FOLDER
        self.saver = Saver(accelerator, recipe.checkpoint, folder, self.state, self.run_dir)
        self.display = display or Display(enabled=accelerator.is_main_process)
        self.watch = Stopwatch()
        max_time = parse_duration(recipe.trainer.max_time)
        self.deadline = None if max_time is None else time.monotonic() + max_time
        self.num_parameters = count_parameters(accelerator, step.models)
        self.model_names = [type(model).__name__ for model in step.models.values()]
        self._samples_before, self._seconds_before = 0, 0.0

    def _plan(self) -> BatchPlan:
        size = num_samples(self.data.train)
        dp_size = self.accelerator.parallel_dims.dp_size
        return plan_batches(self.recipe.trainer, dp_size, size, self._position())

    def _position(self) -> Position | None:
        """Return where the run is resumed: before objects are made, the schedule among them."""
        if self.resume_from is None:
            return None
        recorded = directory.read_manifest(self.resume_from).metadata
        return Position(*(recorded.get(name, 0) for name in ("step", "epoch", "samples_in_epoch")))

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

    def stop(self, reason: str, kind: str = "callback") -> None:
        """End training at this step boundary. Every process must call this together.

        Args:
            reason: one sentence, for the summary.
            kind: `stopped` of the summary.
        """
        if self.stopped is None:
            self.stopped = Stop(kind, reason)
            self.stop_flag.progress.ending = f"after step {self.state.step} ({reason})"

    def check_limits(self, resumed: bool = False) -> None:
        """Stop at a limit of the recipe."""
        state, trainer = self.state, self.recipe.trainer
        if trainer.max_steps is not None and state.step >= trainer.max_steps:
            self.stop(f"trainer.max_steps={trainer.max_steps} reached", "max_steps")
        if trainer.epochs is not None and state.epoch >= trainer.epochs:
            self.stop(f"trainer.epochs={trainer.epochs} completed", "epochs")
        if trainer.stop_after == state.step and not resumed:
            self.stop(f"trainer.stop_after={trainer.stop_after} reached", "stop_after")

    def check_requests(self) -> None:
        """Stop on a request to any rank, or if time is up; all ranks agree."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.stop_flag.request(TIME_IS_UP)
        if self.stopped is None and self.stop_flag.agreed(self.accelerator):
            if self.stop_flag.reason == TIME_IS_UP:
                self.stop(f"trainer.max_time={self.recipe.trainer.max_time} is over", "max_time")
            else:
                self.stop(f"{self.stop_flag.reason} received", "signal")


def count_parameters(
    accelerator: Accelerator, models: Mapping[str, torch.nn.Module]
) -> tuple[int, int]:
    """Return (all, trainable) parameters of several models; shared ones count once."""
    size = accelerator.strategy.state.num_elements
    found = {id(p): p for model in models.values() for p in model.parameters()}.values()
    return sum(map(size, found)), sum(size(p) for p in found if p.requires_grad)


class Stopwatch:
    """Measures training time, with pauses for evaluations and checkpoints."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()
        self._paused = self._paused_in_lap = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in the context."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self._paused += spent
            self._paused_in_lap += spent

    def lap(self) -> float:
        """Return the seconds since the last call, pauses excluded."""
        now = time.perf_counter()
        seconds = now - self._lap - self._paused_in_lap
        self._lap, self._paused_in_lap = now, 0.0
        return seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning, pauses included."""
        return time.perf_counter() - self._start

    @property
    def training(self) -> float:
        """Seconds since the beginning, pauses excluded."""
        return self.elapsed - self._paused


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

    def on_start(self, loop: Run) -> None:
        """Before the first step, after a resume."""

    def on_step(self, loop: Run) -> None:
        """After each optimizer step. Must not wait for the device."""

    def on_log(self, loop: Run, values: Mapping[str, float]) -> None:
        """At a log point, with the values that were read."""

    def on_evaluate(self, loop: Run, split: str, metrics: Mapping[str, float]) -> None:
        """After an evaluation of `split` ("validation", "test")."""

    def on_checkpoint(self, loop: Run, path: str) -> None:
        """After a checkpoint was committed."""

    def on_end(self, loop: Run) -> None:
        """After the last evaluation; on rank 0 before the final table is shown."""
