"""Metrics of a recipe's `metrics` node: objects of torchmetrics that see each sample once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from runner.training.step import checked_metrics, refused, shown

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.training.step import Step

CHUNK = 64  # samples of an update: sums have the same bits however batches are divided


class SampleMetrics:
    """The recipe's metrics over one data set at a time, the same bits on every rank.

    Metrics are those of torchmetrics, or modules with its `update`, `compute` and `reset`.

    Predictions and targets of all ranks are gathered in the order of the data set, and each rank
    updates its metrics with all of them, in chunks of a fixed size. So no metric synchronizes
    itself, and a value does not depend on the number of processes.
    """

    def __init__(self, metrics: Mapping[str, Any], accelerator: Accelerator, step: Step) -> None:
        self._metrics, self._accelerator, self._step = metrics, accelerator, step
        self._waiting: list[torch.Tensor] = []
        for metric in metrics.values():
            metric.reset()
            metric.to(accelerator.device)
            for one in metric.modules():  # each rank has all samples: nothing is to be reduced
                one.distributed_available_fn = lambda: False

    @contextmanager
    def seeing(self, batch: Any) -> Iterator[None]:
        """Add a batch by what the step's models return in the context."""
        outputs: list[object] = []
        with ExitStack() as hooks:
            for model in self._step.models.values() if self._metrics else ():
                hook = model.register_forward_hook(
                    lambda one, given, output: outputs.append(output)
                )
                hooks.enter_context(hook)
            yield
        if not self._metrics:
            return
        found = self._step.metric_inputs(outputs[0] if len(outputs) == 1 else outputs, batch)
        for one in found if isinstance(found, tuple) else [found]:
            if not isinstance(one, torch.Tensor):
                rule = "metrics take tensors (predictions, targets), each [B, ...]"
                remedy = "Define metric_inputs(output, batch), or leave `metrics` out."
                owner = getattr(self._step, "objective", self._step)
                raise refused(owner, "metric_inputs", shown(one), rule, remedy)
        self._update(self._accelerator.gather_for_metrics(list(found)))

    def _update(self, rows: list[torch.Tensor]) -> None:
        if self._waiting:
            rows = [torch.cat(pair) for pair in zip(self._waiting, rows, strict=True)]
        *whole, self._waiting = map(list, zip(*(one.split(CHUNK) for one in rows), strict=True))
        for preds, target in whole:
            self._each(preds, target)

    def _each(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        for metric in self._metrics.values():
            metric.update(preds, target)

    def computed(self) -> dict[str, float]:
        """Return the values of the data set that was seen, and forget it."""
        values: dict[str, object] = {}
        if self._waiting:
            self._each(*self._waiting)
        for name, metric in self._metrics.items():
            value = metric.compute()
            parts = value if isinstance(value, Mapping) else {"": value}
            values |= {f"{name}_{part}" if part else name: one for part, one in parts.items()}
            metric.reset()
        self._waiting = []
        return checked_metrics(self._step, values, "metrics")
