"""The plain loop: epochs of windows, log points, evaluations, checkpoints, one end.

Every rank runs the same lines in the same order. Every decision here depends only on counters and
values that all ranks share, so that none waits for another in a collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accel.errors import ConfigError, Problem
from accel.rng import preserved, set_seed
from runner.config.batch_plan import plan_batches
from runner.config.durations import parse_duration
from runner.data.batches import EvalBatches, TrainBatches
from runner.data.micro_batch import with_last
from runner.reporting.console import Display
from runner.reporting.recorder import Recorder, learning_rates
from runner.run_dir.json_files import write_summary
from runner.training import profiling, return_checks, torch_errors
from runner.training import summary as summaries
from runner.training.callback import Callback
from runner.training.checkpointing import OWN, RunState, Saver, Stateful
from runner.training.evaluation import Interrupted, evaluate, monitored_value
from runner.training.gradient_check import check as check_gradients
from runner.training.hyperparameters import Hyperparameters
from runner.training.metrics import StepMeter, Stopwatch
from runner.training.state import Stop, TrainState
from runner.training.stopping import StopFlag

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.config.batch_plan import BatchPlan
    from runner.config.schema import Recipe
    from runner.data.datasets import Data
    from runner.data.micro_batch import Window
    from runner.training.step import Step

TIME_IS_UP = "max_time"


class Loop:
    """Trains, evaluates and saves one run.

    Args:
        recipe: the run.
        run_dir: its directory.
        accelerator: the engine, built for `plan`.
        step: owns models and optimizers, not prepared yet.
        data: the data sets.
        callbacks: by name.
        plan: batch arithmetic; None: derived from the recipe.
        resume_from: a checkpoint of this run; None: from the beginning.
        stop_flag: receives requests to stop; None: there are none.
        display: shows the run; None: on standard output of rank 0.
        on_begin: called on every process once the state is loaded and the first step is made, or
            none is to be made; before that, nothing of the run directory changes.

    Attributes:
        state: where the run stands.
        stopped: why training ended, None before.
        metrics: the last evaluation of each split.
        schedulers: by the name of their optimizer.
        results: entries that callbacks add to summary.json.
        rows: (label, text) that callbacks add to the final table.
        remeasured: whether a resume changed the data or the objective that evaluations measure by.
        deadline: when `time.monotonic` says so, time is up; None: never.
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
        plan: BatchPlan | None = None,
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
        self.plan = plan or self._plan()
        self.resume_from = None if resume_from is None else str(resume_from)
        self.stop_flag = stop_flag or StopFlag()
        self.display = display or Display(enabled=accelerator.is_main_process)
        self._on_begin = on_begin
        self._begun = False
        self.state = TrainState()
        self.stopped: Stop | None = None
        self.metrics: dict[str, dict[str, float]] = {}
        self.schedulers: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
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
        self._skipped_steps = self._samples_at_log = self._samples_before = 0
        self._seconds_before = 0.0
        self._rates: dict[str, float] = {}
        self._improved = self._nan_noted = self.remeasured = False
        max_time = parse_duration(recipe.trainer.max_time)
        self.deadline = None if max_time is None else time.monotonic() + max_time

    def stop(self, reason: str) -> None:
        """End training at this step boundary. Every process must call this together.

        Args:
            reason: one sentence for people.
        """
        self._end("callback", reason)

    @property
    def complete(self) -> bool:
        """Whether the run has come to its end, and was not only cut off."""
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

    def run(self) -> dict[str, Any]:
        """Train until the end and return the content of `summary.json`.

        Its `stopped` names why the run ended: max_steps, epochs, max_time or callback when it is
        complete, stop_after or signal when it is to be resumed.
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
        self._evaluate_if_due()  # the run was cut off between a step and its evaluation
        anomalies = torch.autograd.set_detect_anomaly(self.recipe.trainer.detect_anomaly)
        translated = torch_errors.translated(self.step.models, lambda: self.state.step)
        with anomalies, translated, profiling.profiler(self) as profiler:
            while self.stopped is None:
                self._train_epoch(profiler)

    def _train_epoch(self, profiler: Any) -> None:
        """Train to the end of the epoch under way, or to a stop within it."""
        state = self.state
        before, skipped = state.step, state.step_in_epoch
        windows: Any = self._train_batches.epoch(state.epoch, skip_steps=skipped)
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
            raise ConfigError(
                Problem(
                    "data.train",
                    "it gave no batch in an epoch",
                    "Give it samples, or set trainer.drop_last=false.",
                )
            )
        if state.step == before:  # the position was the end of a stream of unknown length
            state.end_epoch()
            self._at_boundary()

    def _train_step(self, window: Window) -> None:
        given = self.step.train(self.accelerator, window, self.recipe.trainer)
        values = return_checks.tensors(self.step, "train", given)
        if not self._begun:
            self._begin()
        if self.accelerator.optimizer_step_was_skipped:
            self._skipped_steps += 1
            values.pop("grad_norm", None)  # infinite or not a number, and nothing is wrong
        self.meter.add(values)
        if self._is_logged(self.state.step + 1):  # the rates of this step, not of the next
            self._rates = learning_rates(self.step.optimizers)
        for scheduler, optimizer in self._stepping:
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
        if self.complete or self._is_logged(state.step):
            self._log()
        if self.complete and self.stop_flag.reason == TIME_IS_UP:
            self._save()  # whoever set the limit may not wait for an evaluation
        self._evaluate_if_due()
        if self.saver.due() or self._improved:
            self._save()

    # -- before the first step -------------------------------------------------------------

    def _plan(self) -> BatchPlan:
        size = summaries.num_samples(self.data.train)
        return plan_batches(self.recipe.trainer, self.accelerator.parallel_dims.dp_size, size)

    def _prepare(self) -> None:
        """Hand models, optimizers and prepared_iter that is saved to the engine."""
        step, accelerator = self.step, self.accelerator
        for model in step.models.values():
            if not model.training:  # as `from_pretrained` of several libraries returns it
                model.train()
        prepared = accelerator.prepare(*step.models.values(), *step.optimizers.values())
        prepared_iter = iter(prepared if isinstance(prepared, (tuple, list)) else (prepared,))
        step.models = {name: next(prepared_iter) for name in step.models}
        step.optimizers = {name: next(prepared_iter) for name in step.optimizers}
        self._train_batches = TrainBatches(accelerator, self.data, self.recipe, self.plan)
        self._eval_batches = {
            split: EvalBatches(accelerator, dataset, self.recipe, self.data.collate_fn, split)
            for split, dataset in (("validation", self.data.validation), ("test", self.data.test))
            if dataset is not None
        }
        self._hyper = Hyperparameters(
            self.recipe, step, self.data, self.plan.total_steps, (self.monitor, self.mode)
        )
        schedulers = self._make_schedulers()
        self._hyper.scheduled(step, schedulers)
        pairs: list[tuple[Any, Any]] = [
            (scheduler, step.optimizers[name]) for name, scheduler in schedulers.items()
        ]
        self._plateau = [s for s, _ in pairs if isinstance(s, ReduceLROnPlateau)]
        self._stepping = [p for p in pairs if not isinstance(p[0], ReduceLROnPlateau)]
        self._on_step = [
            callback
            for callback in self.callbacks.values()
            if type(callback).on_step is not Callback.on_step
        ]
        self.schedulers = schedulers
        accelerator.register_for_checkpointing(self._run_state())

    def _make_schedulers(self) -> dict[str, Any]:
        total = self.plan.total_steps
        # A stream without trainer.max_steps has no known end to plan a schedule for.
        schedulers = self.step.make_schedulers(total or 1)
        if schedulers and total is None:
            raise ConfigError(
                Problem(
                    "trainer.max_steps=null with a data set of unknown length",
                    "a learning-rate schedule needs the number of steps",
                    "Set trainer.max_steps, or scheduler=null for a constant rate.",
                )
            )
        return schedulers

    def _run_state(self) -> RunState:
        parts: dict[str, Stateful] = {"train": self.state, "meter": self.meter, OWN: self._hyper}
        parts |= {f"scheduler.{name}": part for name, part in self._hyper.parts.items()}
        for name, callback in self.callbacks.items():
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
                parts[f"callbacks.{name}"] = callback
        self._saved = RunState(parts)
        return self._saved

    def _resume(self) -> None:
        """Restore the checkpoint, or seed the generators that training draws from."""
        # Processes of one replica draw the same, the others differently.
        set_seed(self.recipe.seed + self.accelerator.parallel_dims.dp_rank)
        if self.resume_from is None:
            return
        state = self.state
        self.accelerator.load_state(self.resume_from)
        self._hyper.resume(self)
        self.remeasured = self._hyper.measures_differently
        state.move_to(self.plan.global_batch)
        self.metrics |= self.saver.saved_metrics(self.resume_from)
        self._seconds_before = state.seconds
        self._samples_before = self._samples_at_log = state.samples
        if not self.saver.find_best(self.resume_from):
            self.display.note(
                f"The best state (step {state.best_step}) is in no checkpoint any more: "
                "the best value is reset."
            )
            state.best = state.best_step = None
        added = [name for name in self._saved.added if not self._hyper.knows(name)]
        if added:
            self.display.note(f"Not in the checkpoint, starting fresh: {', '.join(added)}.")
        if self._saved.dropped:
            self.display.note(f"Not in the recipe, dropped: {', '.join(self._saved.dropped)}.")

    def _open(self) -> None:
        """Open the trackers, and show the header."""
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

    def _notify(self, event: str, *values: Any) -> None:
        """Call `event` of the callbacks that define it, with the random generators preserved."""
        for callback in self.callbacks.values():
            if getattr(type(callback), event) is not getattr(Callback, event):
                with preserved():
                    getattr(callback, event)(self, *values)

    # -- why it ends -----------------------------------------------------------------------

    def _end(self, kind: str, reason: str) -> None:
        """Set why training ends; the first reason stays."""
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
        """Stop if any process was asked to, or if time is up; all processes agree."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.stop_flag.request(TIME_IS_UP)
        if self.stopped is None and self.stop_flag.agreed(self.accelerator):
            if self.stop_flag.reason == TIME_IS_UP:
                self._end("max_time", f"trainer.max_time={self.recipe.trainer.max_time} is over")
            else:
                self._end("signal", f"{self.stop_flag.reason} received")

    # -- log points ------------------------------------------------------------------------

    def _is_logged(self, step: int) -> bool:
        return step % self.recipe.trainer.log_every == 0 or step == self.plan.total_steps

    def _drain(self) -> None:
        """Read the values of the steps since the last read; the one wait for the device."""
        self.meter.drain()
        if self.recipe.trainer.stop_on_nan:
            self.meter.check(self.state.step)

    def _log(self) -> None:
        self._drain()
        values = self.meter.take()
        seconds = self.watch.lap()
        samples = self.state.samples - self._samples_at_log
        self._samples_at_log = self.state.samples
        if self._skipped_steps:
            values["skipped_steps"], self._skipped_steps = float(self._skipped_steps), 0
        values |= self._rates or learning_rates(self.step.optimizers)
        self._rates = {}
        values["samples_per_second"] = samples / seconds if seconds > 0 else 0.0
        self.recorder.write("train", values, self.seconds)
        self.display.values(values)
        self._notify("on_log", values)

    # -- evaluation ------------------------------------------------------------------------

    def _evaluate_if_due(self) -> None:
        state, every = self.state, self.recipe.trainer.eval_every
        due = state.step_in_epoch == 0 if every is None else state.step % every == 0
        interrupted = self.stopped is not None and self.stopped.kind == "signal"
        if (due or self.complete) and state.step > 0 and not interrupted:
            self._validate()

    def _validate(self) -> None:
        """Evaluate the validation data once per step, and note whether it is the best so far."""
        state = self.state
        if "validation" not in self._eval_batches or state.evaluated_step == state.step:
            return
        metrics = self._evaluate("validation")
        if metrics is None:
            return
        state.evaluated_step = state.step
        value = monitored_value(metrics, self.monitor)
        if value != value and not self._nan_noted:
            self._nan_noted = True
            self.display.note(
                f"{self.monitor} is not a number (validation, step {state.step}): such a state is "
                "never the best, and counts as no improvement."
            )
        improved = state.improves(value, self.mode)
        if improved:
            state.best, state.best_step = value, state.step
            self._improved = self.recipe.checkpoint.save_best
        for scheduler in self._plateau:
            scheduler.step(value)
        self._report("validation", metrics, "best" if improved else "")

    def _evaluate(self, split: str) -> dict[str, float] | None:
        """Return the metrics of a split; None if the evaluation was left for a stop."""
        batches = self._eval_batches[split]

        def on_batch(index: int) -> bool:
            self.display.evaluating(split, index, batches.num_batches)
            agreed = self.stop_flag.agreed(self.accelerator, "evaluation")
            return agreed and self.stop_flag.reason != TIME_IS_UP

        try:
            with self.watch.paused(), self.stop_flag.progress.slow_phase(f"evaluation ({split})"):
                return evaluate(self.accelerator, self.step, batches, on_batch, batches.num_samples)
        except Interrupted:
            self.stopped = Stop("signal", f"{self.stop_flag.reason} received in evaluation")
            return None

    def _report(self, split: str, metrics: dict[str, float], mark: str) -> None:
        self.metrics[split] = metrics
        self.recorder.write(split, metrics, self.seconds)
        self.display.evaluation(split, self.state.step, self.state.epoch_number, metrics, mark)
        with self.stop_flag.progress.slow_phase("on_evaluate"):
            self._notify("on_evaluate", split, dict(metrics))

    # -- checkpoints -----------------------------------------------------------------------

    def _save(self) -> None:
        self._drain()
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
        """Make the newest checkpoint the best one, if its state was measured to be."""
        if self._improved and self.state.best is not None:
            self.saver.mark_best(self.monitor, self.state.best)
        self._improved = False

    # -- the end ---------------------------------------------------------------------------

    def _finish(self) -> dict[str, Any]:
        """Evaluate and save where due, test the best state, and write the summary."""
        if not self._begun:  # there was no step to make
            self._begin()
        if self.complete:  # a callback may have ended it after the boundary's own evaluation
            if not self.meter.empty:
                self._log()
            self._validate()
        self._save_last()
        if self.complete:
            self._test()
        self._notify("on_end")
        summary = summaries.summary_of(self)
        if self.accelerator.is_main_process:
            write_summary(self.run_dir, summary)
        self.display.final(self.recipe.name, summaries.final_rows(self, summary))
        return summary

    def _save_last(self) -> None:
        wanted = self.recipe.checkpoint.at_end or not self.complete
        if self._improved or (wanted and self.saver.saved_step != self.state.step):
            self._save()

    def _test(self) -> None:
        step = self.saver.load_best()
        if "test" not in self._eval_batches:
            return
        metrics = self._evaluate("test")
        if metrics is not None:
            self._report("test", metrics, f"weights of step {step}")
