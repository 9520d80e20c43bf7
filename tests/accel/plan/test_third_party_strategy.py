"""A strategy of another package: found by its entry point, planned, trained with, saved, loaded.

Holds X1.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from accel.plan.arguments import Arguments
from accel.plan.plan import resolve
from tests.helpers import reset_accel, run_distributed
from tests.third_party import installed, write_package

INPUTS = torch.arange(48.0).reshape(16, 3) / 48
TARGETS = INPUTS.sum(1, keepdim=True)
STEPS = 4


def plugin(**fields: Any) -> Any:
    return importlib.import_module("averaging.plugin").AveragingPlugin(**fields)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def reference() -> dict[str, torch.Tensor]:
    """Train on full batches, in plain torch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        nn.functional.mse_loss(model(INPUTS), TARGETS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(folder: str, state: str) -> dict[str, Any]:
    """Train, save in the middle, and restore what was saved by a fresh `Accelerator`."""
    with installed(Path(folder)):
        first = Session()
        name = type(first.accelerator.strategy).__name__
        first.train(STEPS // 2)
        first.accelerator.save_state(state)
        first.train(STEPS // 2)
        expected = first.weights()
        plan = first.accelerator.plan
        reset_accel()
        second = Session()
        second.accelerator.load_state(state)
        second.train(STEPS // 2)
        again = second.weights()
        reset_accel()
    assert all(torch.equal(again[key], expected[key]) for key in expected)
    return {"class": name, "strategy": plan.strategy, "weights": expected}


class Session:
    """A prepared run; each window of two micro-batches holds all samples."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(
            cpu=True, strategy_plugins=[plugin(order="large")], gradient_accumulation_steps=2
        )
        torch.manual_seed(self.accelerator.process_index)
        model = net()
        if self.accelerator.process_index:  # it gets the weights of rank 0
            nn.init.zeros_(model[0].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        size = 8 // self.accelerator.num_processes
        loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=size)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for inputs, targets in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.mse_loss(self.model(inputs), targets)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.accelerator.get_state_dict(self.model)
        return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_trains_saves_and_loads(world_size: int, tmp_path: Path) -> None:
    folder = write_package(tmp_path / "site")
    found = run_distributed(trained, world_size, str(folder), str(tmp_path / "state"))
    for rank in found:
        assert (rank["class"], rank["strategy"]) == ("AveragingStrategy", "averaging")
        for name, expected in reference().items():
            torch.testing.assert_close(rank["weights"][name], expected, rtol=1e-5, atol=1e-6)


def test_it_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    with installed(write_package(tmp_path)):
        fsdp = importlib.import_module("accel.config.fsdp").FullyShardedDataParallelPlugin()
        arguments = Arguments(cpu=True, strategy_plugins=[plugin(factor=0), fsdp])
        with pytest.raises(ConfigError) as caught:
            resolve(arguments, Environment())
        text = str(caught.value)
        assert "fsdp with averaging: they cannot be combined" in text
        assert "AveragingPlugin.factor=0: a factor of 0 leaves no gradients" in text


def test_without_the_package_it_is_unknown() -> None:
    with pytest.raises(ConfigError, match="each is one of FullyShardedDataParallelPlugin"):
        resolve(Arguments(cpu=True, strategy_plugins=[object()]), Environment())
