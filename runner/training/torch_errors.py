"""Errors of torch in a training step, translated to keys of a recipe."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from accel.machine.errors import ConfigError, Problem, text_of
from runner.recipe import user_frames
from runner.training.metrics import NonFiniteError

ANOMALY = re.compile(r"Function '(\w+)' returned nan values in its (\d+)th output")
UNUSED = "Expected to have finished reduction in the prior iteration"
INDICES = re.compile(r"did not receive grad for rank \d+:((?: \d+)+)")
MOST_NAMES = 5


@contextmanager
def translated(models: Mapping[str, torch.nn.Module], step: Callable[[], int]) -> Iterator[None]:
    """Raise torch's errors of a training step with a remedy in the recipe.

    Raises:
        NonFiniteError: if anomaly detection found a gradient that is not a number.
        ConfigError: if parameters get no gradient in every step under data parallelism.
    """
    origins: list[str] = []
    try:
        with _quiet(origins):
            yield
    except RuntimeError as error:
        text = text_of(error)
        found = ANOMALY.search(text)
        if found:
            where = f" (forward: {origins[-1]})" if origins else ""
            value = f"{found.group(1)} gave a gradient that is NaN at step {step() + 1}{where}"
            rule = "with trainer.detect_anomaly=true it must be a number"
            remedy = "Keep its input away from where its derivative is infinite, or lower the rate."
            raise NonFiniteError(str(Problem(value, rule, remedy))) from None
        if UNUSED in text:
            raise ConfigError(_unused(models, text)) from None
        raise


@contextmanager
def _quiet(origins: list[str]) -> Iterator[None]:
    """Take torch's account of the forward pass of a failed operation; keep where that was."""
    if not torch.is_anomaly_enabled():
        yield
        return
    before = warnings.showwarning

    def show(message: Any, category: Any, *place: Any, **more: Any) -> None:
        if not str(message).startswith("Error detected in"):
            before(message, category, *place, **more)
            return
        for path, line, name in re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(message)):
            if user_frames.is_own(path):
                origins.append(f"{path}:{line} in {name}")

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _unused(models: Mapping[str, torch.nn.Module], text: str) -> Problem:
    found = INDICES.search(text)
    indices = [int(index) for index in found.group(1).split()] if found else []
    names: list[str] = []
    for model in models.values():
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            trained = [name for name, p in model.module.named_parameters() if p.requires_grad]
            names += [trained[index] for index in indices if index < len(trained)]
            break
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    which = f"{', '.join(names[:MOST_NAMES])}{more}" if names else "parameters"
    return Problem(
        f"{which} got no gradient in a step",
        "under data parallelism every trainable parameter must take part in the loss",
        "Set distributed.ddp.find_unused_parameters=true, or freeze unused parameters.",
    )
