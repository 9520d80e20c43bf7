"""The plain loop: epochs of windows, log points, evaluations, checkpoints, one end.

Every rank runs the same lines in the same order. Every decision here depends only on counters and
values that all ranks share, so that none waits for another in a collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accel.checkpoint import directory
from accel.comm.rng import preserved, set_seed
from accel.machine.errors import ConfigError
from runner.data.micro_batch_window import with_last
from runner.recipe.batch_plan import Position, plan_batches
from runner.recipe.durations import parse_duration
from runner.run_dir.json_files import SUMMARY, write_json
from runner.training import profiling, return_checks, torch_errors
from runner.training import summary as summaries
from runner.training.callback import Callback
from runner.training.checkpointing import Saver
from runner.training.console import Display
from runner.training.evaluation_schedule import Evaluations
from runner.training.metrics import StepMeter, Stopwatch
from runner.training.micro_batch_check import check as check_gradients
from runner.training.recorder import Recorder
from runner.training.setup import TrainedLayers, prepare
from runner.training.state import Stop, TrainState
from runner.training.stopping import TIME_IS_UP, StopFlag
from runner.training.train_log import TrainLog

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from torch.profiler import profile

    from accel import Accelerator
    from runner.data.datasets import Data
    from runner.data.micro_batch_window import Window
    from runner.recipe.batch_plan import BatchPlan
    from runner.recipe.schema import Recipe
    from runner.training.step import Step


class Loop:
    """Trains, evaluates and saves one run; its attributes are those of `Run`.

    The accelerator is built for `plan`, and the step is not prepared yet. `resume_from` is a
    checkpoint of this run; None: from the beginning. The display is by default on standard output
    of rank 0. `on_begin` is called on every process once the state is loaded and the first step is
    made, or none is to be made; before that, nothing of the run directory changes.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: str | Path,
        accelerator: Accelerator,
        step: Step,
        data: Data,
        callbacks: Mapping[str, Callback] | None = None,
        *,
        resume_from: str | Path | None = None,
        stop_flag: StopFlag | None = None,
        display: Display | None = None,
        on_begin: Callable[[], None] | None = None,
    ) -> None:
        self.recipe = recipe
        self.run_dir = Path(run_dir)
        self.accelerator = accelerator
        self.step = step
        self.data = data
        self.callbacks = dict(callbacks or {})
        self.resume_from = None if resume_from is None else str(resume_from)
        self.plan = self._plan()
        self.stop_flag = stop_flag or StopFlag()
        self.display = display or Display(enabled=accelerator.is_main_process)
        self._on_begin = on_begin
        self._begun = False
        self.state = TrainState()
        self.stopped: Stop | None = None
        self.metrics: dict[str, dict[str, float]] = {}
        self.weights_step: int | None = None
        self.schedulers: Mapping[str, LRScheduler] = {}
        self.results: dict[str, object] = {}
        self.rows: list[tuple[str, str]] = []
        self.meter = StepMeter(accelerator.comm)
        self.watch = Stopwatch()
        self.num_parameters = summaries.count_parameters(step.models)
        self.model_names = [type(model).__name__ for model in step.models.values()]
        self.monitor = recipe.checkpoint.monitor or step.monitor
        self.mode = recipe.checkpoint.mode or step.mode
        folder = Path(accelerator.project_dir or self.run_dir) / "checkpoints"
        self.saver = Saver(accelerator, recipe.checkpoint, folder, self.state, self.run_dir)
        self.recorder = Recorder(accelerator, recipe, self.run_dir, self.state)
        self._log = TrainLog(self, self.meter, self.recorder)
        self._samples_before, self._seconds_before = 0, 0.0
        self.remeasured = False
        max_time = parse_duration(recipe.trainer.max_time)
        self.deadline = None if max_time is None else time.monotonic() + max_time

    def stop(self, reason: str, kind: str = "callback") -> None:
        """End training at this step boundary. Every process must call this together."""
        self._end(kind, reason)

    @property
    def complete(self) -> bool:
        """Whether the run has reached its end, and is not only interrupted."""
        return self.stopped is not None and self.stopped.complete

    @property
    def seconds(self) -> float:
        """Time spent on the run, over all invocations."""
        return self._seconds_before + self.watch.elapsed

    @property
    def samples_here(self) -> int:
        """Samples trained on in this invocation, over all processes."""
        return self.state.samples - self._samples_before

    # -- the run ---------------------------------------------------------------------------

    def run(self) -> dict[str, object]:
        """Train until the end and return the content of `summary.json`.

        Its `stopped` names why the run ended: max_steps, epochs, max_time, callback or pruned when
        it is complete, stop_after or signal when it is to be resumed.
        """
        try:
            self._prepare()
            self._resume()
            self._open()
            check_gradients(self)
            self._notify("on_start")
            self.display.start(self.state.step, *summaries.limits_of(self))
            self._train()
            with self.stop_flag.progress.slow_phase("the end of the run"):
                return self._finish()
        finally:
            self.display.close()
            self.recorder.close()

    def _train(self) -> None:
        self._check_limits(resumed=True)
        self._evaluations.validate_if_due()  # interrupted between a step and its evaluation
        anomalies = torch.autograd.set_detect_anomaly(self.recipe.trainer.detect_anomaly)
        translated = torch_errors.translated(self.step.models, lambda: self.state.step)
        with anomalies, translated, profiling.profiler(self) as profiler:
            while self.stopped is None:
                self._train_epoch(profiler)

    def _train_epoch(self, profiler: profile | None) -> None:
        """Train to the end of the epoch under way, or to a stop within it."""
        state = self.state
        before, skipped = state.step, state.step_in_epoch
        windows = self._prepared.train_batches.epoch(state.epoch, skip_steps=skipped)
        with contextlib.closing(windows):
            for window, last in with_last(windows, skipped, self.plan.steps_per_epoch):
                self._train_step(window)
                if last:
                    state.end_epoch()
                self._at_boundary()
                if profiler is not None:
                    profiler.step()
                if last or self.stopped is not None:
                    break
        if state.step == before and skipped == 0:
            raise ConfigError.of(
                "data.train",
                "it gave no batch in an epoch",
                "Give it samples, or set trainer.drop_last=false.",
            )
        if state.step == before:  # the position is the end: of a stream, or of an epoch cut shorter
            state.end_epoch()
            self._check_limits(resumed=True)
            self._check_requests()
            self._evaluate_and_save()

    def _train_step(self, window: Window) -> None:
        self._trained_layers.follow()
        given = self.step.train(self.accelerator, window, self.recipe.trainer)
        values = return_checks.tensors(self.step, "train", given)
        if not self._begun:
            self._begin()
        self._log.add(values)
        for scheduler, optimizer in self._prepared.stepping:
            if not optimizer.step_was_skipped:
                scheduler.step()
        self.state.advance(window.num_samples)

    def _at_boundary(self) -> None:
        """Log, evaluate and save between two optimizer steps, where due."""
        state = self.state
        for callback in self._on_step:
            callback.on_step(self)
        self.display.step(state.step, state.epoch_number)
        self._check_limits()
        self._check_requests()
        if self.complete or self._log.due(state.step):
            self._notify("on_log", self._log.write())
        self._evaluate_and_save()

    def _evaluate_and_save(self) -> None:
        if self.complete and self.stop_flag.reason == TIME_IS_UP:
            self._save()  # whoever set the limit may not wait for an evaluation
        self._evaluations.validate_if_due()
        if self.saver.due() or self._evaluations.improved:
            self._save()

    # -- before the first step -------------------------------------------------------------

    def _plan(self) -> BatchPlan:
        size = summaries.num_samples(self.data.train)
        dp_size = self.accelerator.parallel_dims.dp_size
        return plan_batches(self.recipe.trainer, dp_size, size, self._position())

    def _position(self) -> Position | None:
        """Return where the run is resumed: before objects are made, the schedule among them."""
        if self.resume_from is None:
            return None
        recorded = directory.read_manifest(self.resume_from).metadata
        return Position(*(recorded.get(name, 0) for name in ("step", "epoch", "samples_in_epoch")))

    def _prepare(self) -> None:
        self._prepared = prepare(self, self.callbacks, self.meter)
        self._trained_layers = TrainedLayers(self)
        self.schedulers = self._prepared.schedulers
        on_evaluate = partial(self._notify, "on_evaluate")
        self._evaluations = Evaluations(
            self, self._prepared, self.recorder, self.stop_flag, on_evaluate
        )
        self._on_step = [
            callback
            for callback in self.callbacks.values()
            if type(callback).on_step is not Callback.on_step
        ]

    def _resume(self) -> None:
        """Restore the checkpoint, or seed the generators that training draws from."""
        # Processes of one replica draw the same, the others differently.
        set_seed(self.recipe.seed + self.accelerator.parallel_dims.dp_rank)
        if self.resume_from is None:
            return
        state = self.state
        self.accelerator.load_state(self.resume_from)
        hyperparameters = self._prepared.hyperparameters
        hyperparameters.resume(self)
        self.remeasured = hyperparameters.measures_differently
        state.move_to(self.plan.global_batch)
        self.metrics |= self.saver.saved_metrics(self.resume_from)
        self._seconds_before = state.seconds
        self._samples_before = state.samples
        self._log.resume()
        if not self.saver.find_best(self.resume_from):
            self.display.note(
                f"The best state (step {state.best_step}) is in no checkpoint any more: "
                "the best value is reset."
            )
            state.best = state.best_step = None
        saved = self._prepared.saved
        added = [name for name in saved.added if not hyperparameters.knows(name)]
        if added:
            self.display.note(f"Not in the checkpoint, starting fresh: {', '.join(added)}.")
        if saved.dropped:
            self.display.note(f"Not in the recipe, dropped: {', '.join(saved.dropped)}.")

    def _open(self) -> None:
        self.recorder.open(resumed=self.resume_from is not None)
        self.display.header(self.recipe.name, summaries.header_rows(self))

    def _begin(self) -> None:
        """Begin to write to the run directory: until here, nothing in it has changed."""
        self._begun = True
        if self._on_begin is not None:
            self._on_begin()
        self.saver.write_pointer()
        self._mark_best()  # the resumed state may have been evaluated here for the first time
        self.recorder.begin()

    def _notify(self, event: str, *values: object) -> None:
        """Call `event` of the callbacks that define it, with the random generators preserved."""
        for callback in self.callbacks.values():
            if getattr(type(callback), event) is not getattr(Callback, event):
                with preserved():
                    getattr(callback, event)(self, *values)

    # -- why it ends -----------------------------------------------------------------------

    def _end(self, kind: str, reason: str) -> None:
        if self.stopped is None:
            self.stopped = Stop(kind, reason)
            self.stop_flag.progress.ending = f"after step {self.state.step} ({reason})"

    def _check_limits(self, resumed: bool = False) -> None:
        state, trainer = self.state, self.recipe.trainer
        if trainer.max_steps is not None and state.step >= trainer.max_steps:
            self._end("max_steps", f"trainer.max_steps={trainer.max_steps} reached")
        if trainer.epochs is not None and state.epoch >= trainer.epochs:
            self._end("epochs", f"trainer.epochs={trainer.epochs} completed")
        if trainer.stop_after == state.step and not resumed:
            self._end("stop_after", f"trainer.stop_after={trainer.stop_after} reached")

    def _check_requests(self) -> None:
        """Stop on a request to any rank, or if time is up; all ranks agree."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.stop_flag.request(TIME_IS_UP)
        if self.stopped is None and self.stop_flag.agreed(self.accelerator):
            if self.stop_flag.reason == TIME_IS_UP:
                self._end("max_time", f"trainer.max_time={self.recipe.trainer.max_time} is over")
            else:
                self._end("signal", f"{self.stop_flag.reason} received")

    # -- checkpoints -----------------------------------------------------------------------

    def _save(self) -> None:
        self._log.drain()
        state = self.state
        state.seconds = self.seconds
        with self.watch.paused(), self.stop_flag.progress.slow_phase("saving"):
            path = self.saver.save(
                {
                    "run": self.run_dir.name,
                    "step": state.step,
                    "epoch": state.epoch,
                    "samples": state.samples,
                    "samples_in_epoch": state.samples_in_epoch,
                    "num_processes": self.accelerator.num_processes,
                    "global_batch_size": self.plan.global_batch,
                    "monitor": self.monitor,
                    "metrics": self.metrics.get("validation", {}),
                }
            )
            self._mark_best()
        with self.stop_flag.progress.slow_phase("on_checkpoint"):
            self._notify("on_checkpoint", path)

    def _mark_best(self) -> None:
        if self._evaluations.improved and self.state.best is not None:
            self.saver.mark_best(self.monitor, self.state.best)
        self._evaluations.improved = False

    # -- the end ---------------------------------------------------------------------------

    def _finish(self) -> dict[str, object]:
        """Evaluate and save where due, test the best state, and write the summary."""
        if not self._begun:  # there was no step to make
            self._begin()
        if self.complete:  # a callback may have ended it after the boundary's own evaluation
            if not self.meter.empty:
                self._notify("on_log", self._log.write())
            self._evaluations.validate()
        self._save_last()
        if self.stopped is not None and self.stopped.tested:
            self._evaluations.test(self.saver.load_best())
        self._notify("on_end")
        summary = summaries.summary_of(self)
        if self.accelerator.is_main_process:
            write_json(self.run_dir / SUMMARY, summary)
        self.display.final(self.recipe.name, summaries.final_rows(self, summary))
        return summary

    def _save_last(self) -> None:
        wanted = self.recipe.checkpoint.at_end or not self.complete
        if self._evaluations.improved or (wanted and self.saver.saved_step != self.state.step):
            self._save()
