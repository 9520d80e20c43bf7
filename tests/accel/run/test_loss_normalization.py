"""The one normalisation: N accumulated micro-batches on one process are one on each of N.

Holds R1, E3.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from accel import Accelerator
from accel.run.loss_normalization import global_weight, normalize_loss
from tests.helpers import run_distributed

# Tokens of each sequence, one sequence a micro-batch; ragged on purpose. An optimizer step is the
# mean over the tokens of six micro-batches of all processes; the last one has two left.
TOKENS = (3, 1, 4, 2, 5, 1, 1, 7, 2, 2, 1, 3, 6, 1)
PER_STEP = 6


@cache
def sequences() -> list[torch.Tensor]:
    """Return the sequences, [tokens, 2] each."""
    values = torch.linspace(-1.0, 1.0, sum(TOKENS) * 2)
    return list(values.view(-1, 2).split(TOKENS))


def windows() -> list[list[torch.Tensor]]:
    """Return the sequences of each optimizer step."""
    found = sequences()
    return [found[start : start + PER_STEP] for start in range(0, len(found), PER_STEP)]


def make_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def exact_weights() -> list[list[float]]:
    """Return the weights after each step of plain torch, one backward pass over all its tokens."""
    model, optimizer = make_model()
    found = []
    for window in windows():
        (model(torch.cat(window)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.weight.flatten().tolist())
    return found


def accumulated_weights(weigh: str) -> list[list[float]]:
    """Return the weights after each step, where micro-batches are shared out to the processes.

    Args:
        weigh: whether the tokens of a step are "known" to every process, or each knows its "own".
    """
    accelerator = Accelerator(cpu=True)
    rank, count = accelerator.process_index, accelerator.num_processes
    accelerator.gradient_accumulation_steps = PER_STEP // count
    model, optimizer = accelerator.prepare(*make_model())
    found = []
    for window in windows():
        # Every process makes as many micro-batches; in the short window one may have no tokens.
        mine = window[rank::count]
        mine += [torch.empty(0, 2)] * (-(-len(window) // count) - len(mine))
        known: list[torch.Tensor | int] = [len(sequence) for sequence in window]
        own: list[torch.Tensor | int] = [torch.tensor(len(sequence)) for sequence in mine]
        total = global_weight(known if weigh == "known" else own, accelerator)
        for index, sequence in enumerate(mine):
            with accelerator.accumulate(model, sync_gradients=index == len(mine) - 1):
                loss = normalize_loss(
                    (model(sequence) ** 2).sum(),
                    total,
                    grad_size=count,
                    num_steps=accelerator.gradient_accumulation_steps,
                )
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        found.append(accelerator.unwrap_model(model).weight.flatten().tolist())
    return found


@pytest.mark.parametrize("weigh", ["known", "own"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_processes_makes_the_exact_steps(world_size: int, weigh: str) -> None:
    for found in run_distributed(accumulated_weights, world_size, weigh):
        for step, expected in zip(found, exact_weights(), strict=True):
            assert step == pytest.approx(expected, rel=1e-5)


def test_a_plain_number_is_normalised_too() -> None:
    assert normalize_loss(6.0, 3, grad_size=2, num_steps=4) == 16.0
