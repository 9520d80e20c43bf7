"""E3, R1: the supervised step has one gradient, however its samples are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel.accelerator import Accelerator
from accel.machine.errors import ConfigError
from runner.data.batches import MicroBatch, Window
from runner.recipe.schema import Trainer
from runner.training.step import Objective, SupervisedStep
from tests.helpers import run_distributed

NUM_SAMPLES = 12


class Regression(Objective):
    """Squared errors, weighted where the batch brings weights."""

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        errors = (model(batch["x"]) - batch["y"]).square()
        return (errors * batch["w"] if "w" in batch else errors).sum(dim=1)

    def weights(self, batch: Any) -> torch.Tensor | None:
        return batch["w"].sum(dim=1) if "w" in batch else None


def samples(weighted: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    data = {
        "x": torch.randn(NUM_SAMPLES, 3, generator=generator),
        "y": torch.randn(NUM_SAMPLES, 2, generator=generator),
    }
    if weighted:
        data["w"] = (torch.rand(NUM_SAMPLES, 2, generator=generator) > 0.4).float()
    return data


def part(data: dict[str, torch.Tensor], start: int, stop: int, size: int) -> MicroBatch:
    """Return samples start..stop, padded to `size` with samples that would ruin the loss."""
    real = stop - start
    padded = {
        name: torch.cat([tensor[start:stop], torch.full_like(tensor[: size - real], 1e6)])
        for name, tensor in data.items()
    }
    valid = None if real == size else torch.arange(size) < real
    return MicroBatch(padded, valid)


def make_step(
    accelerator: Accelerator, objective: Objective | None = None, lr: float = 0.1
) -> SupervisedStep:
    torch.manual_seed(0)
    step = SupervisedStep(
        nn.Linear(3, 2),
        objective or Regression(),
        lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        lambda optimizer, num_steps: torch.optim.lr_scheduler.LinearLR(
            optimizer, total_iters=num_steps
        ),
    )
    model, optimizer = accelerator.prepare(step.models["model"], step.optimizers["optimizer"])
    step.models, step.optimizers = {"model": model}, {"optimizer": optimizer}
    return step


def train(cuts: list[tuple[int, int]], size: int, weighted: bool) -> tuple[float, list[float]]:
    """Return this process's share of the loss and the weights after one step on `cuts`."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(cuts))
    step = make_step(accelerator)
    data = samples(weighted)
    window = Window([part(data, *cut, size) for cut in cuts], NUM_SAMPLES)
    values = step.train(accelerator, window, Trainer())
    weights = [p.detach().flatten() for p in step.models["model"].parameters()]
    return values["loss"].item(), torch.cat(weights).tolist()


def train_on_rank(cuts_by_rank: list[list[tuple[int, int]]], size: int, weighted: bool) -> Any:
    import os

    return train(cuts_by_rank[int(os.environ["RANK"])], size, weighted)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("cuts", "size"),
    [([(0, 4), (4, 8), (8, 12)], 4), ([(0, 5), (5, 10), (10, 12)], 5)],
    ids=["even", "ragged"],
)
def test_accumulated_micro_batches_make_the_step_of_one_batch(
    cuts: list[tuple[int, int]], size: int, weighted: bool
) -> None:
    whole = train([(0, NUM_SAMPLES)], NUM_SAMPLES, weighted)
    loss, weights = train(cuts, size, weighted)
    assert loss == pytest.approx(whole[0], rel=1e-5)
    assert weights == pytest.approx(whole[1], rel=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_two_processes_make_the_step_of_one(weighted: bool) -> None:
    whole = train([(0, NUM_SAMPLES)], NUM_SAMPLES, weighted)
    cuts = [[(0, 4), (4, 8)], [(8, 11), (11, 12)]]
    answers = run_distributed(train_on_rank, 2, cuts, 4, weighted)
    assert sum(loss for loss, _ in answers) == pytest.approx(whole[0], rel=1e-5)
    for _, weights in answers:
        assert weights == pytest.approx(whole[1], rel=1e-5)


def test_a_window_without_any_weight_changes_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    step = make_step(accelerator)
    before = step.models["model"].weight.clone()
    data = samples(weighted=True)
    data["w"].zero_()
    values = step.train(accelerator, Window([MicroBatch(data)], NUM_SAMPLES), Trainer())
    assert values["loss"].item() == 0.0
    assert torch.equal(step.models["model"].weight, before)


def test_gradients_are_clipped_by_value() -> None:
    accelerator = Accelerator(cpu=True)
    step = make_step(accelerator, lr=1.0)
    before = step.models["model"].weight.detach().clone()
    window = Window([MicroBatch(samples())], NUM_SAMPLES)
    step.train(accelerator, window, Trainer(clip_grad_value=0.001))
    assert (step.models["model"].weight - before).abs().max().item() <= 0.001001


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    calls: list[int] = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return wrapped, calls


def test_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    step = make_step(accelerator)
    data = samples(weighted=True)
    window = Window([part(data, 0, 6, 6), part(data, 6, 12, 6)], NUM_SAMPLES)
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__"):
        wrapped, calls = counted(getattr(torch.Tensor, name))
        monkeypatch.setattr(torch.Tensor, name, wrapped)
        reads.append(calls)
    values = step.train(accelerator, window, Trainer())
    monkeypatch.undo()
    assert [len(calls) for calls in reads] == [0, 0, 0, 0]
    assert values["loss"].requires_grad is False


class Returning(Regression):
    """An objective whose losses are a given value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def losses(self, model: nn.Module, batch: Any) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "found"), [(torch.ones(()), r"shape \[\]"), (None, "None"), (0.5, "a float")]
)
def test_a_loss_that_is_not_per_sample_is_refused(value: object, found: str) -> None:
    """C1: in training, and in the short evaluation before it."""
    accelerator = Accelerator(cpu=True)
    step = make_step(accelerator, Returning(value))
    with pytest.raises(ConfigError, match=f"Returning.losses returned {found}"):
        step.train(accelerator, Window([MicroBatch(samples())], NUM_SAMPLES), Trainer())
    with torch.no_grad(), pytest.raises(ConfigError, match=f"Returning.losses returned {found}"):
        step.evaluate(samples())
