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
    several = accelerator.num_processes > 1
    if several or spec.owns_parameters or spec.owns_precision or accelerator.scaler is not None:
        rule = "it needs one process, no strategy and no loss scaling"
        loop.display.note(f"trainer.check_gradients: skipped; {rule}.")
        return
    samples = _samples(loop)
    half = len(samples) // 2
    if half == 0:
        return
    joined = datasets.Collate(loop.data.collate_fn)
    halves = [samples[:half], samples[half:]]
    with _restored(loop):
        one, again, two = (
            _gradient(loop, [joined(part) for part in cut], len(samples), seed)
            for cut, seed in (([samples], 0), ([samples], 1), (halves, 0))
        )
    limit = ROUNDING.get(loop.recipe.precision.mode, ROUNDING_IN_LOW_PRECISION)
    if _difference(one, again) > limit:
        loop.display.note("trainer.check_gradients: skipped; the step itself draws at random.")
    elif _difference(one, two) > limit:
        ratio = float(two.norm() / one.norm())
        value = (
            f"{type(loop.step).__name__}.train: the gradient of 2 micro-batches is {ratio:.3g} "
            "times that of the same samples as 1, or points elsewhere"
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
            stream = datasets.SeededStream(dataset, loop.recipe.seed)
            found = list(itertools.islice(stream, count))
    return found[: len(found) - len(found) % 2]


@contextlib.contextmanager
def _restored(loop: Run) -> Iterator[None]:
    """Leave generators, modes, gradients, buffers and the count of micro-batches as they were."""
    accelerator = loop.accelerator
    micro_batches, step = accelerator.gradient_accumulation_steps, accelerator.step
    try:
        with preserved(), evaluation_mode(loop.step), buffers_kept(loop.step):
            yield
    finally:
        accelerator.gradient_accumulation_steps, accelerator.step = micro_batches, step
        accelerator.gradient_state.sync_gradients = True


def _gradient(loop: Run, batches: list[object], num_samples: int, seed: int) -> torch.Tensor:
    """Return the gradients of all updates of a window, as one vector."""
    accelerator = loop.accelerator
    accelerator.gradient_accumulation_steps = len(batches)
    accelerator.step = 0
    set_seed(seed)
    seen: list[torch.Tensor] = [torch.zeros(1)]
    micro = OnDevice([MicroBatch(batch) for batch in batches], accelerator.device)
    with contextlib.ExitStack() as stack:
        for optimizer in loop.step.optimizers.values():
            stack.enter_context(_recorded(unwrap_optimizer(optimizer), seen))
        loop.step.train(accelerator, Window(micro, num_samples), loop.recipe.trainer)
    for model in loop.step.models.values():
        model.zero_grad(set_to_none=True)
    return torch.cat(seen)


@contextlib.contextmanager
def _recorded(optimizer: Any, seen: list[torch.Tensor]) -> Iterator[None]:
    def step(*arguments: object, **named: object) -> None:
        flat = (parameter for group in optimizer.param_groups for parameter in group["params"])
        seen.extend(p.grad.detach().float().flatten().cpu() for p in flat if p.grad is not None)

    own = optimizer.__dict__.get("step")  # a scheduler's counter of calls
    optimizer.step = step
    try:
        yield
    finally:
        del optimizer.step
        if own is not None:
            optimizer.step = own


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference of two gradients, relative to the larger norm."""
    if one.shape != other.shape:  # other updates, or other parameters
        return float("inf")
    largest = max(float(one.norm()), float(other.norm()))
    return float((one - other).norm()) / largest if largest > 0 else 0.0
