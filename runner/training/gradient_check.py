"""Checks of a step's gradient: how samples are cut must not matter, and no parameter may lack one.

A `Step` of a user's own that hands `Accelerator.backward` a loss of the wrong scale trains
more slowly, silently. So ``trainer.check_gradients`` computes the first samples as one micro-batch
and as two, and compares the gradients at the optimizers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from accel.comm.rng import preserved, set_seed
from accel.machine.errors import ConfigError
from accel.optimizer import unwrap_optimizer
from runner.data import datasets
from runner.data.batches import MicroBatch, OnDevice, Window
from runner.training.evaluation import buffers_kept, evaluation_mode

if TYPE_CHECKING:
    from runner.training.run import Run

# Largest difference of gradients, relative to their norm, that is rounding.
ROUNDING = {"no": 1e-3}
ROUNDING_IN_LOW_PRECISION = 0.05
MOST_SAMPLES = 64  # per window
CONTRACT = (
    "the gradient of a step is that of its loss over all samples, however they are cut into "
    "micro-batches; Accelerator.backward divides by the number of micro-batches, and processes are "
    "averaged"
)
REMEDY = (
    "Make the step with runner.optimizer_step; by hand, sum the loss over the samples of each "
    "micro-batch and give runner.normalize_loss(total, global_weight, grad_size=…, num_steps=…) to "
    "accelerator.backward."
)


def check(loop: Run) -> None:
    """Compare the gradients of one micro-batch and of two, if the recipe wants it.

    The run is unchanged by it. Models are in eval mode meanwhile, so that dropout and batch
    statistics do not differ. It needs one process, and a step that draws nothing at random itself.

    Raises:
        ConfigError: if they differ by more than rounding.
    """
    if not loop.recipe.trainer.check_gradients or loop.resume_from is not None:
        return
    accelerator, spec = loop.accelerator, loop.accelerator.plan.spec
    if accelerator.num_processes > 1 or spec.owns_parameters or spec.owns_precision:
        loop.display.note("trainer.check_gradients: skipped; it needs one process and no strategy.")
        return
    samples = _samples(loop)
    half = len(samples) // 2
    if half == 0:
        return
    joined = loop.data.collate_fn or datasets.collate
    joint = [samples]
    halves = [samples[:half], samples[half:]]
    with _restored(loop):
        one, again, two = (
            _gradients(loop, [joined(part) for part in cut], len(samples), seed)
            for cut, seed in ((joint, 0), (joint, 1), (halves, 0))
        )
    limit = ROUNDING.get(loop.recipe.precision.mode, ROUNDING_IN_LOW_PRECISION)
    if _difference(one, again) > limit:
        loop.display.note("trainer.check_gradients: skipped; the step itself draws at random.")
        return
    _require_equal(type(loop.step).__name__, one, two, limit)


def _require_equal(
    name: str, one: list[list[torch.Tensor]], two: list[list[torch.Tensor]], limit: float
) -> None:
    if len(one) != len(two):
        value = f"{name}.train made {len(one)} updates of 1 micro-batch and {len(two)} of 2"
        raise ConfigError.of(value, "a window is one optimizer step", REMEDY)
    if _difference(one, two) > limit:
        value = (
            f"{name}.train: the gradient of 2 micro-batches is {_ratio(one, two):.3g} times that "
            "of the same samples as 1, or points elsewhere"
        )
        raise ConfigError.of(value, CONTRACT, REMEDY)


def _samples(loop: Run) -> list[object]:
    """Return the first samples of the training data, an even number of them."""
    dataset = loop.data.train
    count = min(loop.plan.global_batch, MOST_SAMPLES)
    count = max(2, count - count % 2)
    with preserved():
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            found = [dataset[index] for index in range(min(count, len(dataset)))]
        else:
            found = list(itertools.islice(iter(dataset), count))
    return found[: len(found) - len(found) % 2]


@contextlib.contextmanager
def _restored(loop: Run) -> Iterator[None]:
    """Leave generators, modes, gradients, buffers, the scale and the count of micro-batches."""
    accelerator = loop.accelerator
    scaler = accelerator.scaler
    scale = None if scaler is None else scaler.state_dict()
    micro_batches, step = accelerator.gradient_accumulation_steps, accelerator.step
    try:
        with preserved(), evaluation_mode(loop.step), buffers_kept(loop.step):
            yield
    finally:
        accelerator.gradient_accumulation_steps, accelerator.step = micro_batches, step
        accelerator.gradient_state.sync_gradients = True
        for model in loop.step.models.values():
            model.zero_grad(set_to_none=True)
        if scaler is not None and scale:
            scaler.load_state_dict(scale)


def _gradients(
    loop: Run, batches: list[object], num_samples: int, seed: int
) -> list[list[torch.Tensor]]:
    """Return the gradients that each call of an optimizer's step would have used."""
    accelerator = loop.accelerator
    accelerator.gradient_accumulation_steps = len(batches)
    accelerator.step = 0
    set_seed(seed)
    seen: list[list[torch.Tensor]] = []
    micro = [MicroBatch(batch) for batch in batches]
    with contextlib.ExitStack() as stack:
        for optimizer in loop.step.optimizers.values():
            stack.enter_context(_recorded(unwrap_optimizer(optimizer), seen))
        loop.step.train(
            accelerator,
            Window(OnDevice(micro, accelerator.device), num_samples),
            loop.recipe.trainer,
        )
    for model in loop.step.models.values():
        model.zero_grad(set_to_none=True)
    return seen


@contextlib.contextmanager
def _recorded(optimizer: Any, seen: list[list[torch.Tensor]]) -> Iterator[None]:
    def step(*arguments: object, **named: object) -> None:
        flat = (parameter for group in optimizer.param_groups for parameter in group["params"])
        seen.append([p.grad.detach().clone() for p in flat if p.grad is not None])

    own = optimizer.__dict__.get("step")  # a scheduler's counter of calls
    optimizer.step = step
    try:
        yield
    finally:
        del optimizer.step
        if own is not None:
            optimizer.step = own


def _flat(updates: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.cat(
        [g.float().flatten() for update in updates for g in update] or [torch.zeros(1)]
    )


def _difference(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> float:
    """Return the norm of the difference of two gradients, relative to the larger norm."""
    a, b = _flat(one), _flat(other)
    if a.shape != b.shape:
        return float("inf")
    largest = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / largest if largest > 0 else 0.0


def _ratio(one: list[list[torch.Tensor]], two: list[list[torch.Tensor]]) -> float:
    a, b = _flat(one), _flat(two)
    return float(b.norm() / a.norm()) if float(a.norm()) > 0 else float("inf")
