"""The plain loop: epochs of windows, log points, checkpoints, evaluations, one end.

Every rank runs the same lines in the same order. Every decision here depends only on counters and
values that all ranks share, so that none waits for another in a collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from accel.checkpoint import directory
from accel.comm.rng import set_seed
from accel.machine.errors import AccelError, ConfigError
from accel.strategies.trainable_changes import Trainable
from runner.data.batches import TrainBatches, eval_batches, with_last
from runner.recipe.user_frames import one_line
from runner.runs.json_files import SUMMARY, TIME_IS_UP, write_json
from runner.training import gradient_check, initial_weights
from runner.training import summary as summaries
from runner.training.checkpointing import RunState
from runner.training.due import Due
from runner.training.evaluation import Evaluations, evaluation_weights, share_buffers
from runner.training.hyperparameters import Hyperparameters, find_plateaus, make_schedulers
from runner.training.metrics import NonFiniteError, Recorder
from runner.training.run import Run
from runner.training.step import checked_tensors

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from torch.profiler import profile

    from runner.data.batches import Window


class LateError(AccelError):
    """A mistake that was found after a step was trained: the run has failed, not been refused."""


class Loop(Run):
    """Trains, evaluates and saves one run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._begun = self._saving = False
        self.recorder = Recorder(self)
        self._prepare()

    def _prepare(self) -> None:
        """Hand models, optimizers, loaders and schedules to the engine."""
        recipe, accelerator, step, data = self.recipe, self.accelerator, self.step, self.data
        for model in step.models.values():
            if not model.training:  # as `from_pretrained` of several libraries returns it
                model.train()
            data.check_model(model)
        self.notify("on_setup")
        if self.answering("on_before_optimizer_step"):
            for optimizer in step.optimizers.values():
                optimizer.register_step_pre_hook(lambda *_: self._before_optimizer_step())
        prepared = accelerator.prepare(*step.models.values(), *step.optimizers.values())
        objects = iter(prepared if isinstance(prepared, (tuple, list)) else (prepared,))
        step.models = {name: next(objects) for name in step.models}
        step.optimizers = {name: next(objects) for name in step.optimizers}
        self._trainable = {name: Trainable(model) for name, model in step.models.items()}
        self.speed.attach(step)
        self._batches = TrainBatches(accelerator, data, recipe, self.plan)
        sets = {
            split: eval_batches(accelerator, data, recipe, split) if recipe.trainer.evaluate else {}
            for split in ("validation", "test")
        }
        if recipe.checkpoint.monitor is not None:
            self.require_validation(f"checkpoint.monitor={recipe.checkpoint.monitor}")
        self._due = Due(self)
        self._hyperparameters = Hyperparameters(self)
        self.schedulers = make_schedulers(self)
        plateaus = find_plateaus(self)
        self._hyperparameters.start()
        self._stepping: list[tuple[LRScheduler, Any]] = [
            (scheduler, step.optimizers[name])
            for name, scheduler in self.schedulers.items()
            if name not in plateaus
        ]
        self._evaluations = Evaluations(self, sets, list(plateaus.values()), self.recorder)
        parts: dict[str, Any] = {
            "train": self.state,
            "meter": self.recorder.meter,
            "recipe": self._hyperparameters,
        }
        for name, callback in self.callbacks.items():
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
                parts[f"callbacks.{name}"] = callback
        self._saved = RunState(parts)
        accelerator.register_for_checkpointing(self._saved)

    # -- the run ---------------------------------------------------------------------------

    def run(self) -> dict[str, object]:
        """Train until the end and return the content of `summary.json`.

        Its `stopped` names why the run ended: max_steps, epochs, max_time, callback or pruned when
        it is complete, stop_after or signal when it is to be resumed.
        """
        try:
            self._resume()
            self.display.header(self.recipe.name, summaries.header_rows(self))
            gradient_check.check(self)
            if self.resume_from is None and self.recipe.trainer.sanity_steps:
                self._evaluations.check(self.recipe.trainer.sanity_steps)
            self.recorder.open()
            self.notify("on_start")
            epochs, total = self.recipe.trainer.epochs, self.plan.total_steps
            self.display.start(self.state.step, total, epochs, self.deadline)
            if self.recipe.trainer.eval_first and self.state.step == 0:
                self._evaluations.validate()
            self._train()
            with self.stop_flag.progress.in_phase("the end of the run"):
                return self._finish()
        except Exception as error:
            self.notify("on_exception", error)
            if isinstance(error, ConfigError) and self._begun:
                raise LateError(str(error)) from error
            raise
        finally:
            self.display.close()
            self.recorder.close()

    def _train(self) -> None:
        for optimizer in self.step.optimizers.values():
            optimizer.train()  # type: ignore[attr-defined]  # a restored one has averaged weights
        self.watch.add("start", self.watch.unknown)
        self.check_limits(resumed=True)
        self._validate_if_due()  # a signal may have interrupted it
        anomalies = torch.autograd.set_detect_anomaly(self.recipe.trainer.detect_anomaly)
        with anomalies, self._profiler() as profiling:
            while self.stopped is None:
                self._train_epoch(profiling)

    def _train_epoch(self, profiling: profile | None) -> None:
        """Train to the end of the epoch under way, or to a stop within it."""
        state = self.state
        before, skipped = state.step, state.step_in_epoch
        if skipped == 0:
            self.notify("on_epoch_start")
        windows = self.speed.fetching(self._batches.epoch(state.epoch, skip_steps=skipped))
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
            self._evaluate_and_save()

    def _train_step(self, window: Window) -> None:
        self._follow_layers()
        values = self.speed.train(self.step, window, self.recipe.trainer)
        if not self._begun:
            values = checked_tensors(self.step, "train", values)
            self._begin()
        self.recorder.add(dict(values))
        for scheduler, optimizer in self._stepping:
            if not optimizer.step_was_skipped:
                scheduler.step()
        self.state.advance(window.num_samples)

    def _before_optimizer_step(self) -> None:
        self.speed.begin("")  # the time of callbacks is their own
        self.notify("on_before_optimizer_step")

    def _follow_layers(self) -> None:
        """Wrap models again whose layers were frozen, unfrozen, added or replaced."""
        models = self.step.models
        for name, known in self._trainable.items():
            if known.changed():
                models[name] = self.accelerator.prepare_model(models[name])
                self._trainable[name] = Trainable(models[name])

    def _at_boundary(self) -> None:
        """Log, evaluate and save between two optimizer steps, where due."""
        state = self.state
        with self._saved_on_error():
            for callback in self.callbacks.values():
                callback.on_step(self)
            if state.step_in_epoch == 0:
                self.notify("on_epoch_end")
            self.display.step(state.step, state.epoch_number)
            self.check_limits()
            self.check_requests()
            if self.complete or self.logs_at(state.step):
                self.notify("on_log", self.recorder.log())
            self._evaluate_and_save()

    def _validate_if_due(self) -> None:
        interrupted = self.stopped is not None and self.stopped.kind == "signal"
        if not interrupted and (self.complete or self._due.evaluation()):
            self._evaluations.validate()

    def _evaluate_and_save(self) -> None:
        """Evaluate, then save: a checkpoint holds what was measured of it."""
        self._validate_if_due()
        state, saved = self.state, self.saver.saved_step
        at_end = self.recipe.checkpoint.at_end or self.stop_flag.reason == TIME_IS_UP
        due = self._due.checkpoint() or (at_end and self.complete)
        if self._is_best_unsaved() or (due and state.step not in (0, saved)):
            self._save()

    def _is_best_unsaved(self) -> bool:
        return self._evaluations.improved and self.state.step == self.state.evaluated_step

    # -- stops -----------------------------------------------------------------------------

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
        agreed = self.stopped is None and self.stop_flag.agreed(self.accelerator)
        self._due.at(self._seconds_before + self.stop_flag.seconds)
        if agreed:
            if self.stop_flag.reason == TIME_IS_UP:
                self.stop(f"trainer.max_time={self.recipe.trainer.max_time} is over", TIME_IS_UP)
            else:
                self.stop(f"{self.stop_flag.reason} received", "signal")

    # -- before the first step -------------------------------------------------------------

    def _resume(self) -> None:
        """Restore the checkpoint, or seed the generators that training draws from."""
        # Processes of one replica draw the same, the others differently.
        set_seed(self.recipe.seed + self.accelerator.parallel_dims.draw_rank)
        if self.resume_from is None:
            initial_weights.load(self)
            return
        self.accelerator.load_state(self.resume_from)
        self._hyperparameters.resume()
        self.state.move_to(self.plan.global_batch)
        found = directory.read_manifest(self.resume_from).metadata.get("metrics")
        if found:
            self.metrics["validation"] = dict(found)
        self._seconds_before, self._samples_before = self.state.seconds, self.state.samples
        self._due.resume(self._seconds_before)
        added, dropped = self._saved.added, self._saved.dropped
        for note in (
            self.saver.resume(self.resume_from),
            f"Not in the checkpoint, starting fresh: {', '.join(added)}." if added else "",
            f"Not in the recipe, dropped: {', '.join(dropped)}." if dropped else "",
        ):
            if note:
                self.display.note(note)

    def _begin(self) -> None:
        """Begin to write to the run directory: until here, nothing in it has changed."""
        self._begun = True
        self.on_begin()
        self.recorder.begin(tests=self.stopped is not None and self.stopped.tested)

    def _profiler(self) -> contextlib.AbstractContextManager[profile | None]:
        handler = self.recipe.profile
        if handler is None:
            return contextlib.nullcontext()
        if handler.output_trace_dir is not None or handler.on_trace_ready is None:
            folder = self.run_dir / (handler.output_trace_dir or "profile")
            handler = replace(handler, output_trace_dir=str(folder))
        return self.accelerator.profile(handler)

    # -- checkpoints -----------------------------------------------------------------------

    def _save(self) -> None:
        self.recorder.drain()
        self.state.seconds = self.seconds
        self._saving = True
        with self.watch.paused("saving"), self.stop_flag.progress.in_phase("saving"):
            try:
                share_buffers(self.step, self.accelerator)
                self.notify("on_save_start")
                with evaluation_weights(self.step):
                    path = self.saver.save(summaries.metadata_of(self), self.monitor)
            finally:
                self.notify("on_save_end")
        self._saving = self._evaluations.improved = False
        with self.stop_flag.progress.in_phase("on_checkpoint"):
            self.notify("on_checkpoint", path)

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
                if not self.recorder.meter.empty:
                    self.notify("on_log", self.recorder.log())
                self._evaluations.validate()
            wanted = self.recipe.checkpoint.at_end or not self.complete
            unsaved = wanted and self.saver.saved_step != self.state.step
            if unsaved or self._is_best_unsaved():
                self._save()
        if self.stopped is not None and self.stopped.tested:
            with evaluation_weights(self.step):
                self._evaluations.test(self.saver.load_best())
        self.notify("on_end")
        summary = summaries.summary_of(self)
        if self.accelerator.is_main_process:
            write_json(self.run_dir / SUMMARY, summary)
        self.display.final(self.recipe.name, summaries.final_rows(self, summary))
        return summary
