"""When evaluations and checkpoints of a run are due: by steps, epochs and time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.machine.errors import ConfigError
from runner.recipe.units import Interval, parse_duration, parse_interval

if TYPE_CHECKING:
    from runner.training.run import Run


class Due:
    """What is due at a step boundary, from counters and a clock that all ranks share.

    Raises:
        ConfigError: if evaluations are to come in parts of an epoch of unknown length.
    """

    def __init__(self, run: Run) -> None:
        trainer, self._run = run.recipe.trainer, run
        given = parse_interval(trainer.eval_every, "trainer.eval_every")
        self._evaluation = given or Interval(1, "epochs")
        if self._evaluation.every < 1 and run.plan.steps_per_epoch is None:
            raise ConfigError.of(
                f"trainer.eval_every={trainer.eval_every} with a stream of unknown size",
                "a fraction of an epoch needs its length",
                "Give optimizer steps, or a time such as 00:10:00.",
            )
        every_time = parse_duration(run.recipe.checkpoint.every_time)
        self._saving = None if every_time is None else Interval(every_time, "seconds")
        self._clock = 0.0, 0.0  # seconds of the run at the last two boundaries

    def at(self, seconds: float) -> None:
        """Move to a step boundary, so many seconds after the start of the run."""
        self._clock = self._clock[1], seconds

    def resume(self, seconds: float) -> None:
        """Begin at a boundary that a resumed run starts from: what was due by time was done."""
        self._clock = seconds, seconds

    def evaluation(self) -> bool:
        """Return whether the recipe asks for an evaluation here."""
        return self._run.state.step > 0 and self._passed(self._evaluation)

    def checkpoint(self) -> bool:
        """Return whether the recipe asks for a checkpoint here."""
        state, settings = self._run.state, self._run.recipe.checkpoint
        if any(n and state.step % n == 0 for n in (settings.every_steps, settings.keep_every)):
            return True
        if self._saving is not None and self._passed(self._saving):
            return True
        epochs = settings.every_epochs
        return epochs is not None and state.step_in_epoch == 0 and state.epoch % epochs == 0

    def _passed(self, interval: Interval) -> bool:
        """Return whether the last step has passed a multiple of an interval."""
        state, size = self._run.state, self._run.plan.steps_per_epoch
        if interval.unit == "seconds":
            return interval.crossed(*self._clock)
        if interval.unit == "steps":
            return interval.crossed(state.step - 1, state.step)
        if interval.every >= 1 or size is None:  # whole epochs are passed at their ends alone
            return state.step_in_epoch == 0 and interval.crossed(state.epoch - 1, state.epoch)
        now = state.epoch + state.step_in_epoch / size
        return interval.crossed(now - 1 / size, now)
