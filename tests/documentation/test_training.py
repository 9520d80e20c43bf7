"""E1, E3: training examples of the reference leave what a loop written by hand leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from tests.documentation import training
from tests.documentation.player import Example, shown
from tests.documentation.training import BATCH_SIZE, RATE, loss_func, make_data, make_model

SIZES = (1, 2)


def flat(parameters: Iterable[Tensor]) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).tolist()


def descend(
    model: torch.nn.Module, loss: Tensor, clip: Callable[[list[Tensor]], object] | None = None
) -> list[float]:
    """Make one step of gradient descent by hand; return the weights after it."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    if clip is not None:
        clip(parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter -= RATE * torch.as_tensor(parameter.grad)
    return flat(parameters)


def by_hand(
    processes: int,
    first: int = 0,
    samples: int = training.SAMPLES,
    scale: float = 1.0,
    target: bool = True,
    clip: Callable[[list[Tensor]], object] | None = None,
) -> list[float]:
    """Return the weights after a pass over global batches, in one process, without the engine."""
    model = make_model()
    inputs, targets = make_data(samples).tensors
    size = BATCH_SIZE * processes
    for start in range(first * size, samples, size):
        batch = slice(start, start + size)
        loss = loss_func(model(inputs[batch]), targets[batch] if target else None) * scale
        descend(model, loss, clip)
    return flat(model.parameters())


def weights_of(example: Example, processes: int) -> list[float]:
    """Return the weights that an example leaves, the same on every process."""
    first, *others = [answer.observed for answer in shown(example, processes)]
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("processes", SIZES)
def test_accumulate(processes: int) -> None:
    expected = by_hand(processes, target=False)
    for answer in shown(training.ACCUMULATE, processes):
        weights, rate = answer.observed
        assert weights == pytest.approx(expected, abs=1e-6)
        # StepLR(step_size=6): the rate falls with the sixth batch, whichever process had it.
        assert rate == pytest.approx(0.1 * RATE)


CLIPS = [
    (training.CLIP_GRAD_NORM, lambda found: torch.nn.utils.clip_grad_norm_(found, 0.5)),
    (training.CLIP_GRAD_VALUE, lambda found: torch.nn.utils.clip_grad_value_(found, 0.05)),
]


@pytest.mark.parametrize("processes", SIZES)
@pytest.mark.parametrize(("example", "clip"), CLIPS, ids=["norm", "value"])
def test_clip(example: Example, clip: Callable[[list[Tensor]], object], processes: int) -> None:
    expected = by_hand(processes, scale=0.5, clip=clip)
    assert weights_of(example, processes) == pytest.approx(expected, abs=1e-6)
    assert expected != pytest.approx(by_hand(processes, scale=0.5), abs=1e-3)


@pytest.mark.parametrize("processes", training.SKIP_FIRST_BATCHES.sizes)
def test_skip_first_batches(processes: int) -> None:
    expected = by_hand(processes, first=2)
    weights = weights_of(training.SKIP_FIRST_BATCHES, processes)
    assert weights == pytest.approx(expected, abs=1e-6)


def joined_by_hand() -> list[float]:
    """Two processes, three batches: the lone gradient of the third is divided by two."""
    model = make_model()
    inputs = make_data(6).tensors[0]
    descend(model, loss_func(model(inputs[:4])))
    return descend(model, loss_func(model(inputs[4:])) * 0.5)


@pytest.mark.timeout(60)
def test_join_uneven_inputs() -> None:
    expected = by_hand(1, samples=6, target=False)
    alone = weights_of(training.JOIN_UNEVEN_INPUTS, 1)
    assert alone == pytest.approx(expected, abs=1e-6)
    assert len(shown(training.JOIN_UNEVEN_INPUTS, 2)) == 2  # it ends


@pytest.mark.timeout(60)
def test_join_uneven_inputs_of_the_wrapped_model() -> None:
    weights = weights_of(training.JOIN_UNEVEN_INPUTS_OF_DDP, 2)
    assert weights == pytest.approx(joined_by_hand(), abs=1e-6)


@pytest.mark.parametrize("processes", SIZES)
def test_no_sync(processes: int) -> None:
    """The second pass adds to what the first left, and only then processes exchange the sum."""
    shares = [sum(rank >= column for rank in range(processes)) / processes for column in range(3)]
    expected = [-RATE * 2 * BATCH_SIZE * share for share in shares]
    assert weights_of(training.NO_SYNC, processes) == pytest.approx(expected)


@pytest.mark.parametrize("processes", SIZES)
@pytest.mark.parametrize(
    ("example", "second"),
    [(training.NO_SYNC_OF_TWO_BATCHES, 0), (training.TRIGGER_SYNC_IN_BACKWARD, 6)],
    ids=["no_sync", "trigger_sync_in_backward"],
)
def test_two_batches_before_a_step(example: Example, second: int, processes: int) -> None:
    model = make_model()
    inputs, size = make_data().tensors[0], BATCH_SIZE * processes
    losses = [loss_func(model(inputs[start : start + size])) for start in (0, second)]
    expected = descend(model, losses[0] + losses[1])
    assert weights_of(example, processes) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("processes", SIZES)
def test_prepare(processes: int) -> None:
    model = "Linear" if processes == 1 else "DistributedDataParallel"
    kinds = [model, "AcceleratedOptimizer", "DataLoaderShard", "AcceleratedScheduler"]
    for answer in shown(training.PREPARE, processes):
        assert answer.observed == (kinds, True)
    for answer in shown(training.PREPARE_WITH_DEVICE_PLACEMENT, processes):
        assert answer.observed == (kinds, False)


@pytest.mark.parametrize("processes", SIZES)
def test_unwrap_model(processes: int) -> None:
    wrapped = "MyModel" if processes == 1 else "DistributedDataParallel"
    for answer in shown(training.UNWRAP_MODEL, processes):
        assert answer.lines == [wrapped, "MyModel"]
