"""Batch arithmetic: from an optimizer step to the micro-batches of each rank. Free of torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from accel.machine.errors import ConfigError, Problem, Problems
from runner.recipe.schema import Trainer
from runner.recipe.units import counted, nearest_multiples


class RunLength(int):
    """Number of optimizer steps of a run, with what else a schedule may depend on.

    Attributes:
        steps_per_epoch: None: not known.
        max_seconds: after which the run ends; None: no limit.
        mode: whether the best monitored value is the "max" or the "min".
    """

    steps_per_epoch: int | None = None
    max_seconds: float | None = None
    mode: Literal["max", "min"] = "min"

    def steps(self, duration: float | str, key: str) -> float:
        """Return a duration in steps: as such, below 1 a fraction of the run, or "2 epochs".

        Raises:
            ConfigError: about `key`, if it is none of them or epochs have no known length.
        """
        epochs = re.fullmatch(r"(\d+(?:\.\d+)?) ?epochs?", str(duration))
        if epochs and self.steps_per_epoch is not None:
            return float(epochs[1]) * self.steps_per_epoch
        if isinstance(duration, str) or not 0 <= duration < math.inf:
            rule = "it is a number of steps, below 1 a fraction of the run, or a text '2 epochs'"
            rule = "epochs of this data set have no known length" if epochs else rule
            raise ConfigError.of(f"{key}={duration!r}", rule, f"Set {key}=100, for instance.")
        return duration * self if duration < 1 else duration

    def whole_steps(self, duration: float | str, key: str) -> int:
        """Return a duration rounded to steps, at least 1; see `steps`."""
        return max(1, round(self.steps(duration, key)))


@dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer steps made, epochs completed, samples in the one under way."""

    step: int = 0
    epoch: int = 0
    samples_in_epoch: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes and step counts of a run.

    global_batch = micro_batch × accumulation × dp_size.

    Attributes:
        global_batch: samples per optimizer step.
        micro_batch: samples per process and forward pass.
        accumulation: forward passes per optimizer step.
        dp_size: data-parallel size.
        eval_batch: samples per process in evaluation.
        steps_per_epoch: optimizer steps per epoch, limits included; None: not known.
        total_steps: optimizer steps of the run, the nearer of its limits; None: not known.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    dp_size: int
    eval_batch: int
    steps_per_epoch: int | None = None
    total_steps: int | None = None

    @property
    def round_size(self) -> int:
        """Samples that all processes together compute in one forward pass."""
        return self.micro_batch * self.dp_size


def plan_batches(
    trainer: Trainer, dp_size: int, num_samples: int | None, position: Position | None = None
) -> BatchPlan:
    """Derive the batch arithmetic of a run.

    `num_samples` of the training data is None where it is not known (yet). `position` is where the
    run is resumed, maybe with epochs of another length; None: at its start.

    Raises:
        ConfigError: naming every size that does not divide or leaves no step, with valid ones.
    """
    problems = Problems()
    micro, accumulation = _micro_and_accumulation(trainer, dp_size, problems)
    steps = None if num_samples is None else _steps_per_epoch(trainer, num_samples, problems)
    problems.raise_if()
    return BatchPlan(
        global_batch=trainer.global_batch_size,
        micro_batch=micro,
        accumulation=accumulation,
        dp_size=dp_size,
        eval_batch=trainer.eval_batch_size or 2 * micro,
        steps_per_epoch=steps,
        total_steps=_total_steps(trainer, steps, position or Position()),
    )


def limited(limit: int | float | None, count: int) -> int:
    """Return how many of `count` batches a limit leaves: a number of them, or a fraction (≥ 1)."""
    if limit is None:
        return count
    return min(count, max(1, int(limit * count)) if isinstance(limit, float) else limit)


def _micro_and_accumulation(trainer: Trainer, dp_size: int, problems: Problems) -> tuple[int, int]:
    """Return (micro-batch, accumulation); add a problem for sizes that do not divide."""
    total, micro = trainer.global_batch_size, trainer.micro_batch_size
    accumulation = trainer.accumulation.num_steps
    given = f"trainer.global_batch_size={total}"
    if micro is not None and accumulation is not None:
        product = micro * accumulation * dp_size
        if product != total:
            problems.add(
                f"{given} with trainer.micro_batch_size={micro}, "
                f"trainer.accumulation.num_steps={accumulation} and "
                f"{counted(dp_size, 'process')}",
                "it is their product",
                f"Set trainer.global_batch_size={product}, or leave one of the two out.",
            )
        return micro, accumulation
    divisor = dp_size * (micro or accumulation or 1)
    if total % divisor:
        problems.append(_indivisible(trainer, dp_size, divisor))
    share = max(1, total // divisor)
    if micro is not None:
        return micro, share
    return share, accumulation or 1


def _indivisible(trainer: Trainer, dp_size: int, divisor: int) -> Problem:
    total = trainer.global_batch_size
    parts = [counted(dp_size, "process")]
    if trainer.micro_batch_size is not None:
        parts.append(f"trainer.micro_batch_size={trainer.micro_batch_size}")
    elif trainer.accumulation.num_steps is not None:
        parts.append(f"trainer.accumulation.num_steps={trainer.accumulation.num_steps}")
    sizes = " or ".join(str(size) for size in nearest_multiples(total, divisor))
    return Problem(
        f"trainer.global_batch_size={total} with {' and '.join(parts)}",
        f"it divides by {divisor}, so that each process and forward pass gets as many samples",
        f"Set trainer.global_batch_size={sizes}.",
    )


def _steps_per_epoch(trainer: Trainer, num_samples: int, problems: Problems) -> int:
    total = trainer.global_batch_size
    steps = num_samples // total if trainer.drop_last else -(-num_samples // total)
    if steps == 0:
        problems.add(
            f"{num_samples} training samples with trainer.global_batch_size={total}",
            "an epoch has at least one step",
            "Give more data, a smaller batch, or trainer.drop_last=false."
            if num_samples
            else "Give training data that is not empty.",
        )
    steps = limited(trainer.limit_train_batches, steps)
    return limited(trainer.overfit_batches, steps)


def _total_steps(trainer: Trainer, steps_per_epoch: int | None, position: Position) -> int | None:
    limits = [] if trainer.max_steps is None else [trainer.max_steps]
    if trainer.epochs is not None and steps_per_epoch is not None:
        in_epoch = min(position.samples_in_epoch // trainer.global_batch_size, steps_per_epoch)
        remaining = max(0, (trainer.epochs - position.epoch) * steps_per_epoch - in_epoch)
        limits.append(position.step + remaining)
    return min(limits, default=None)
