"""Modules of a sharded model that are called by themselves: their parameters are gathered, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.accel.strategies.training import BATCH, VOCABULARY, Model, build, data, difference
from tests.helpers import run_distributed

CLOSE = 1e-5


class Inner(torch.nn.Module):
    """A model within another, as an adapter has it, with a method of its own."""

    _no_split_modules = Model._no_split_modules

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(frozen=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.forward(tokens)

    def score(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def losses_of(model: Inner, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return what is trained on: a call of a method, of one layer alone, and of the model."""
    hidden = model.model.embed(tokens)
    return [
        model.score(tokens).logsumexp(-1).mean(),
        model.model.head(torch.ones_like(hidden)).square().mean(),
        model.model.blocks[1](hidden).square().mean(),
        model(tokens).square().mean(),
    ]


def check_inner_calls(precision: str, plugin: dict[str, Any]) -> None:
    accelerator = build(fsdp=plugin, mixed_precision=precision)
    model, plain = Inner(), Inner()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    tokens = torch.stack([data()[index][0] for index in range(BATCH)])
    rank, size = accelerator.process_index, accelerator.num_processes
    own = tokens.chunk(size)[rank]
    exact = precision == "no"
    with torch.inference_mode():  # the first call of all, and not of the model
        apart = (model.model.embed(own) - plain.model.embed(own)).abs().max()
    assert apart <= (0.0 if exact else 1e-2)
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
    for number in range(4):
        accelerator.backward(losses_of(model, own)[number])
        losses_of(plain, tokens)[number].backward()
        for stepped in (optimizer, reference):
            stepped.step()
            stepped.zero_grad()
    weights = accelerator.get_state_dict(model)
    assert difference(weights, plain.state_dict()) < (CLOSE if exact else 2e-2)
    with torch.no_grad():
        found, expected = model.score(own), plain.score(own)
        assert found.shape == (*own.shape, VOCABULARY)
        apart = (found - expected).abs().max() / expected.abs().max()
        assert apart < (CLOSE if exact else 5e-2), apart
    accelerator.end_training()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_modules_inside_are_called_and_trained_by_themselves(precision: str) -> None:
    run_distributed(check_inner_calls, 2, precision, {})


@pytest.mark.slow  # the same in other ways of sharding
@pytest.mark.parametrize(
    "plugin",
    [
        {"reshard_after_forward": False},
        {"auto_wrap_policy": "no_wrap"},
        {"dp_replicate_size": "all", "reshard_after_forward": True},
    ],
)
def test_modules_inside_are_called_however_the_model_is_sharded(plugin: dict[str, Any]) -> None:
    run_distributed(check_inner_calls, 2, "no", plugin)
