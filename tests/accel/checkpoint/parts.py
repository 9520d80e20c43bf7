"""A small run with dropout, a scheduler and a shuffled loader, for the tests of whole states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel.comm.rng import set_seed
from accel.config.training import DataLoaderConfiguration, ProjectConfiguration


@dataclass
class Run:
    """An accelerator and what it prepared."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any

    def train(self, epochs: int = 1) -> list[float]:
        """Train and return the losses."""
        losses = []
        for _ in range(epochs):
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(inputs), targets)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                losses.append(loss.item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the model's weights."""
        return {k: v.clone() for k, v in self.accelerator.get_state_dict(self.model).items()}

    def moments(self) -> list[torch.Tensor]:
        """Return the optimizer's tensors, in the order of its parameters."""
        state = self.optimizer.state_dict()["state"]
        return [state[i][k] for i in sorted(state) for k in sorted(state[i])]

    def everything(self) -> list[torch.Tensor]:
        """Return weights and optimizer tensors."""
        return [*self.weights().values(), *(tensor.clone() for tensor in self.moments())]


def build(seed: int = 0, cpu: bool = True, **kwargs: Any) -> Run:
    """Return a run; its data are the same whatever the seed."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator)
    )
    set_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(cpu=cpu, dataloader_config=config, **kwargs)
    return Run(accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))


def automatic(folder: Path, limit: int | None = None, **kwargs: Any) -> ProjectConfiguration:
    """Return the configuration of automatic naming in `folder`."""
    return ProjectConfiguration(
        project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=limit, **kwargs
    )


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Return whether two lists of tensors agree in every bit."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


class Counter:
    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
