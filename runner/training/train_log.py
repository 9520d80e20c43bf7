"""Values of training steps, averaged and written at log points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.training.recorder import learning_rates

if TYPE_CHECKING:
    import torch

    from runner.training.current_run import Run
    from runner.training.metrics import StepMeter
    from runner.training.recorder import Recorder


class TrainLog:
    """The log points of a run's training; only they read values from the device."""

    def __init__(self, run: Run, meter: StepMeter, recorder: Recorder) -> None:
        self._run, self._meter, self._recorder = run, meter, recorder
        self._samples = self._skipped_steps = 0
        self._rates: dict[str, float] = {}

    def resume(self) -> None:
        """Measure the throughput from the restored state on."""
        self._samples = self._run.state.samples

    def due(self, step: int) -> bool:
        """Return whether an optimizer step is a log point."""
        run = self._run
        return step % run.recipe.trainer.log_every == 0 or step == run.plan.total_steps

    def add(self, values: dict[str, torch.Tensor]) -> None:
        """Add this rank's shares of the values of a step, before the step is counted."""
        run = self._run
        if run.accelerator.optimizer_step_was_skipped:
            self._skipped_steps += 1
            values.pop("grad_norm", None)  # infinite or not a number, and nothing is wrong
        self._meter.add(values)
        if self.due(run.state.step + 1):  # the rates of this step, not of the next
            self._rates = learning_rates(run.step.optimizers)

    def drain(self) -> None:
        """Read the values of the steps since the last read; the one wait for the device."""
        self._meter.drain()
        if self._run.recipe.trainer.stop_on_nan:
            self._meter.check(self._run.state.step)

    def write(self) -> dict[str, float]:
        """Write the means since the last log point, show them, and return them."""
        self.drain()
        run, values = self._run, self._meter.take()
        seconds = run.watch.lap()
        samples = run.state.samples - self._samples
        self._samples = run.state.samples
        of_run: dict[str, float] = {}
        if self._skipped_steps:
            of_run["skipped_steps"], self._skipped_steps = float(self._skipped_steps), 0
        of_run |= self._rates or learning_rates(run.step.optimizers)
        self._rates = {}
        of_run["samples_per_second"] = samples / seconds if seconds > 0 else 0.0
        self._recorder.write("train", values, run.seconds, of_run)
        values = self._recorder.renamed(values, of_run) | of_run
        run.display.values(values)
        return values
