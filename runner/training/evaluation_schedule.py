"""Evaluations during a run: when they are due, and whether they find a better state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from runner.training.evaluation import Interrupted, evaluate, monitored_value
from runner.training.state import Stop
from runner.training.stopping import TIME_IS_UP, StopFlag

if TYPE_CHECKING:
    from runner.training.current_run import Run
    from runner.training.recorder import Recorder
    from runner.training.setup import Prepared


class Evaluations:
    """Evaluates the validation and the test data of a run, and updates its metrics, best and stop.

    A request to stop interrupts an evaluation. `on_evaluate` is called with split and metrics after
    each. `improved`: the present state is the best so far, and not saved as such yet.
    """

    def __init__(
        self,
        run: Run,
        prepared: Prepared,
        recorder: Recorder,
        stop_flag: StopFlag,
        on_evaluate: Callable[[str, dict[str, float]], None],
    ) -> None:
        self._run, self._prepared, self._recorder = run, prepared, recorder
        self._stop_flag, self._on_evaluate = stop_flag, on_evaluate
        self._nan_noted = False
        self.improved = False

    def validate_if_due(self) -> None:
        """Evaluate the validation data, if the recipe wants it at this step or the run ends."""
        run, every = self._run, self._run.recipe.trainer.eval_every
        state = run.state
        due = state.step_in_epoch == 0 if every is None else state.step % every == 0
        interrupted = run.stopped is not None and run.stopped.kind == "signal"
        if (due or run.complete) and state.step > 0 and not interrupted:
            self.validate()

    def validate(self) -> None:
        """Evaluate the validation data once per step, and note whether the state is the best."""
        run, state = self._run, self._run.state
        if "validation" not in self._prepared.eval_batches or state.evaluated_step == state.step:
            return
        metrics = self._evaluate("validation")
        if metrics is None:
            return
        state.evaluated_step = state.step
        value = monitored_value(metrics, run.monitor)
        if math.isnan(value) and not self._nan_noted:
            self._nan_noted = True
            run.display.note(
                f"{run.monitor} is not a number (validation, step {state.step}): such a state is "
                "never the best, and counts as no improvement."
            )
        improved = state.improves(value, run.mode)
        if improved:
            state.best, state.best_step = value, state.step
            self.improved = run.recipe.checkpoint.save_best
        for scheduler in self._prepared.plateaus:
            scheduler.step(value)
        self._report("validation", metrics, "best" if improved else "")

    def test(self, step: int) -> None:
        """Evaluate the test data, if there is any, with the weights of `step`."""
        run = self._run
        if "test" not in self._prepared.eval_batches:
            return
        metrics = self._evaluate("test")
        if metrics is not None:
            run.weights_step = step
            self._report("test", metrics, f"weights of step {step}", step)

    def _evaluate(self, split: str) -> dict[str, float] | None:
        """Return the metrics of a split; None if the evaluation was interrupted by a stop."""
        run, stop_flag = self._run, self._stop_flag
        batches = self._prepared.eval_batches[split]

        def on_batch(index: int) -> bool:
            run.display.evaluating(split, index, batches.num_batches)
            agreed = stop_flag.agreed(run.accelerator, "evaluation")
            return agreed and stop_flag.reason != TIME_IS_UP

        try:
            with run.watch.paused(), stop_flag.progress.slow_phase(f"evaluation ({split})"):
                return evaluate(run.accelerator, run.step, batches, on_batch, batches.num_samples)
        except Interrupted:
            run.stopped = Stop("signal", f"{stop_flag.reason} received in evaluation")
            return None

    def _report(
        self, split: str, metrics: dict[str, float], mark: str, weights_step: int | None = None
    ) -> None:
        run = self._run
        run.metrics[split] = metrics
        self._recorder.write(split, metrics, run.seconds, weights_step=weights_step)
        run.display.evaluation(split, run.state.step, run.state.epoch_number, metrics, mark)
        with self._stop_flag.progress.slow_phase("on_evaluate"):
            self._on_evaluate(split, dict(metrics))
