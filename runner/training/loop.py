"""The plain loop: epochs of windows, log points, checkpoints, evaluations, one end.

Every rank runs the same lines in the same order. Every decision here depends only on counters and
values that all ranks share, so that none waits for another in a collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accel.comm.rng import preserved, set_seed
from accel.machine.errors import AccelError, ConfigError
from runner.data.batches import with_last
from runner.recipe.user_frames import one_line
from runner.runs.json_files import SUMMARY, write_json
from runner.training import gradient_check, return_checks
from runner.training import summary as summaries
from runner.training.evaluation import Evaluations
from runner.training.metrics import NonFiniteError, Recorder, StepMeter, TrainLog
from runner.training.run import Callback, Run
from runner.training.setup import TrainedLayers, prepare, profiler
from runner.training.stopping import TIME_IS_UP, StopFlag

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel import Accelerator
    from runner.data.batches import Window
    from runner.data.datasets import Data
    from runner.recipe.schema import Recipe
    from runner.training.console import Display
    from runner.training.step import Step


class LateError(AccelError):
    """A mistake that was found after a step was trained: the run has failed, not been refused."""


class Loop(Run):
    """Trains, evaluates and saves one run.

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
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            recipe,
            run_dir,
            accelerator,
            step,
            data,
            resume_from=resume_from,
            stop_flag=stop_flag,
            display=display,
        )
        self.callbacks = dict(callbacks or {})
        self.meter = StepMeter(accelerator.comm)
        self.recorder = Recorder(accelerator, recipe, self.run_dir, self.state)
        self._log = TrainLog(self, self.meter, self.recorder)
        self._on_begin = on_begin
        self._begun = self._saving = False

    # -- the run ---------------------------------------------------------------------------

    def run(self) -> dict[str, object]:
        """Train until the end and return the content of `summary.json`.

        Its `stopped` names why the run ended: max_steps, epochs, max_time, callback or pruned when
        it is complete, stop_after or signal when it is to be resumed.
        """
        try:
            self._prepare()
            self._resume()
            self.display.header(self.recipe.name, summaries.header_rows(self))
            gradient_check.check(self)
            if self.resume_from is None and self.recipe.trainer.sanity_steps:
                self._evaluations.check(self.recipe.trainer.sanity_steps)
            self.recorder.open(resumed=self.resume_from is not None)
            self._notify("on_start")
            self.display.start(self.state.step, *summaries.limits_of(self))
            self._train()
            with self.stop_flag.progress.slow_phase("the end of the run"):
                return self._finish()
        except ConfigError as error:
            if self._begun:
                raise LateError(str(error)) from error
            raise
        finally:
            self.display.close()
            self.recorder.close()

    def _train(self) -> None:
        self.check_limits(resumed=True)
        self._evaluations.resume()
        anomalies = torch.autograd.set_detect_anomaly(self.recipe.trainer.detect_anomaly)
        with anomalies, gradient_check.torch_explained(self.state), profiler(self) as profiling:
            while self.stopped is None:
                self._train_epoch(profiling)

    def _train_epoch(self, profiling: profile | None) -> None:
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
                if profiling is not None:
                    profiling.step()
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
            self.check_limits(resumed=True)
            self.check_requests()
            self._save_and_evaluate()

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
        """Log, save and evaluate between two optimizer steps, where due."""
        state = self.state
        with self._saved_on_error():
            for callback in self._on_step:
                callback.on_step(self)
            self.display.step(state.step, state.epoch_number)
            self.check_limits()
            self.check_requests()
            if self.complete or self._log.due(state.step):
                self._notify("on_log", self._log.write())
            self._save_and_evaluate()

    def _save_and_evaluate(self) -> None:
        # Saved first: neither an error in the evaluation nor a limit on time loses what is due.
        at_end = self.recipe.checkpoint.at_end or self.stop_flag.reason == TIME_IS_UP
        if self.saver.due(at_end and self.complete):
            self._save()
        self._evaluations.validate_if_due()
        if self._evaluations.improved:
            self._save_best()

    # -- before the first step -------------------------------------------------------------

    def _prepare(self) -> None:
        self._prepared = prepare(self, self.callbacks, self.meter)
        self._trained_layers = TrainedLayers(self)
        self.schedulers = self._prepared.schedulers
        self._evaluations = Evaluations(
            self,
            self._prepared.eval_batches,
            self._prepared.plateaus,
            self.recorder,
            self._notify,
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
        self.accelerator.load_state(self.resume_from)
        hyperparameters, saved = self._prepared.hyperparameters, self._prepared.saved
        hyperparameters.resume(self)
        self.remeasured = hyperparameters.measures_differently
        self.state.move_to(self.plan.global_batch)
        self.metrics |= self.saver.saved_metrics(self.resume_from)
        self._seconds_before, self._samples_before = self.state.seconds, self.state.samples
        self._log.resume()
        notes = [self.saver.find_best(self.resume_from), saved.changes(hyperparameters.knows)]
        for note in filter(None, notes):
            self.display.note(note)

    def _begin(self) -> None:
        """Begin to write to the run directory: until here, nothing in it has changed."""
        self._begun = True
        self._on_begin()
        self.saver.write_pointer()
        if self._evaluations.improved:  # the resumed state was evaluated here
            self._save_best()
        repeated = ["validation"] if self._evaluations.repeated else []
        if self.stopped is not None and self.stopped.tested:  # there is no step to make
            repeated.append("test")
        self.recorder.begin(repeated)

    def _notify(self, event: str, *values: object) -> None:
        """Call `event` of the callbacks that define it, with the random generators preserved."""
        for callback in self.callbacks.values():
            if getattr(type(callback), event) is not getattr(Callback, event):
                with preserved():
                    getattr(callback, event)(self, *values)

    # -- checkpoints -----------------------------------------------------------------------

    def _save(self) -> None:
        self._log.drain()
        state = self.state
        state.seconds = self.seconds
        state.evaluation_due = self._evaluations.due()
        self._saving = True
        with self.watch.paused(), self.stop_flag.progress.slow_phase("saving"):
            path = self.saver.save(summaries.metadata_of(self))
        self._saving = False
        with self.stop_flag.progress.slow_phase("on_checkpoint"):
            self._notify("on_checkpoint", path)

    def _save_best(self) -> None:
        """Mark the checkpoint of this step as the best, and write it if there is none yet."""
        if self.saver.saved_step != self.state.step:
            self._save()
        self.saver.mark_best(self.monitor, self.state.best)
        self._evaluations.improved = False

    @contextlib.contextmanager
    def _saved_on_error(self) -> Iterator[None]:
        """Save the last whole step after an error in the context, if all ranks have one there."""
        try:
            yield
        except NonFiniteError:  # an error of the step itself
            raise
        except Exception as error:
            step = self.state.step
            wanted = step != self.saver.saved_step and not self._saving
            if wanted and self.stop_flag.all_failed(self.accelerator, step):
                try:
                    self._save()
                except Exception as second:
                    error.add_note(f"The state of step {step} is lost: {one_line(second)}")
            raise

    # -- the end ---------------------------------------------------------------------------

    def _finish(self) -> dict[str, object]:
        """Evaluate and save where due, test the best state, and write the summary."""
        if not self._begun:  # there was no step to make
            self._begin()
        with self._saved_on_error():
            if self.complete:  # a callback may have ended it after the boundary's own evaluation
                if not self.meter.empty:
                    self._notify("on_log", self._log.write())
                self._evaluations.validate()
            wanted = self.recipe.checkpoint.at_end or not self.complete
            if wanted and self.saver.saved_step != self.state.step:
                self._save()
            if self._evaluations.improved:
                self._save_best()
        if self.stopped is not None and self.stopped.tested:
            self._evaluations.test(self.saver.load_best())
        self._notify("on_end")
        summary = summaries.summary_of(self)
        if self.accelerator.is_main_process:
            write_json(self.run_dir / SUMMARY, summary)
        self.display.final(self.recipe.name, summaries.final_rows(self, summary))
        return summary
