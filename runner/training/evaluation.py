"""Evaluation on a data set, without any effect on training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from accel.comm.ops import broadcast_object_list
from accel.comm.rng import preserved
from accel.machine.errors import ConfigError, nearest
from runner.training import return_checks

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.training.step import Step


class Interrupted(Exception):
    """An evaluation was left because the run is to stop."""


def monitored_value(
    metrics: Mapping[str, float], monitor: str | None, key: str = "checkpoint.monitor"
) -> float:
    """Return the monitored metric; a ConfigError about `key` if it was not measured."""
    if monitor is None or monitor not in metrics:
        rule = f"the evaluation measures {', '.join(metrics)}"
        raise ConfigError.of(f"{key}={monitor!r}", rule, nearest(str(monitor), metrics))
    return metrics[monitor]


def evaluate(
    accelerator: Accelerator,
    step: Step,
    batches: Iterable[object],
    on_batch: Callable[[int], bool] = lambda index: False,
    num_samples: int | None = None,
) -> dict[str, float]:
    """Return the metrics of a data set, the same on every process.

    Models are in eval mode and no gradients are kept; modes and random generators are afterwards as
    they were.

    Args:
        accelerator: the run's engine.
        step: its `evaluate` and `summarize` measure.
        batches: this process's part of the data set, from prepared loaders.
        on_batch: called after each batch with their count; True leaves the evaluation. Every
            process must get the same answer.
        num_samples: how many samples there are, if known: as many must have been measured.

    Raises:
        Interrupted: if `on_batch` said so.
        ConfigError: if the values are not per sample.
    """
    with preserved(), evaluation_mode(step), torch.no_grad():
        values = _measure(accelerator, step, batches, on_batch)
        _check_counts(step, values, num_samples)
        metrics = return_checks.metrics(_measuring(step), step.summarize(values))
    # Sums of floats on several devices may differ in the last bit; decisions must not.
    shared = [metrics]
    if accelerator.num_processes > 1:
        broadcast_object_list(shared)
    return shared[0]


def _measure(
    accelerator: Accelerator,
    step: Step,
    batches: Iterable[object],
    on_batch: Callable[[int], bool],
) -> dict[str, torch.Tensor]:
    """Return each value of all samples: [N, ...]."""
    parts: dict[str, list[torch.Tensor]] = {}
    for index, batch in enumerate(batches, start=1):
        values = return_checks.tensors(_measuring(step), "evaluate", step.evaluate(batch))
        measured = accelerator.gather_for_metrics(values)
        for name, value in measured.items():
            parts.setdefault(name, []).append(value)
        if on_batch(index):
            raise Interrupted
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def _measuring(step: Step) -> object:
    """Return the user's object that measures: the step's objective, or the step itself."""
    return getattr(step, "objective", step)


def _check_counts(step: Step, values: Mapping[str, torch.Tensor], num_samples: int | None) -> None:
    counts = {name: len(value) for name, value in values.items()}
    if not counts:
        rule, remedy = "nothing was measured", "Give a data set that is not empty."
    elif len(set(counts.values())) > 1:
        rule, remedy = "the counts differ", "Return tensors [B, ...] from `evaluate`."
    elif num_samples is not None and set(counts.values()) != {num_samples}:
        rule = f"the data set has {num_samples} samples"
        remedy = "Return one row per sample of the batch, [B, ...], from `evaluate`."
    else:
        return
    name = type(_measuring(step)).__name__
    raise ConfigError.of(f"{name}.evaluate measured {counts}", rule, remedy)


@contextmanager
def evaluation_mode(step: Step) -> Iterator[None]:
    """Switch the models (and optimizers that have modes) of `step` to evaluation and back."""
    modules = [module for model in step.models.values() for module in model.modules()]
    modes = [module.training for module in modules]
    switching = [o for o in step.optimizers.values() if hasattr(o, "eval") and hasattr(o, "train")]
    for model in step.models.values():
        model.eval()
    for optimizer in switching:
        optimizer.eval()
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for optimizer in switching:
            optimizer.train()
