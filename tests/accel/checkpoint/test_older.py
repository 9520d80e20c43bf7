"""States that earlier versions wrote load, and training goes on as if it had not been cut off.

The folders below `older/` were written at commit ea4c8a6, by `train` of this file with `save_at=3`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from tests.helpers import run_distributed

OLDER = Path(__file__).parent / "older"
NUM_BATCHES, SAVED_AT = 6, 3
# Losses behind the state of two processes, as that version went on: it seeded orders otherwise.
REST = [0.09213871508836746, 0.48523715138435364, 4.219677448272705]


class Model(nn.Module):
    _tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012 - as transformers has it

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def train(
    tp_size: int, resume_from: str | None = None, save_at: int | None = None, folder: str = ""
) -> list[float]:
    """Return the losses of the batches of one epoch, from where `resume_from` was saved."""
    plugin = TorchTensorParallelPlugin(tp_size=tp_size) if tp_size > 1 else None
    accelerator = Accelerator(cpu=True, torch_tp_plugin=plugin)
    torch.manual_seed(0)
    plain = Model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(24, 3, generator=generator), torch.randn(24, 1, generator=generator)
    )
    model, optimizer, loader, scheduler = accelerator.prepare(
        plain, optimizer, DataLoader(data, 4, shuffle=True), scheduler
    )
    if resume_from is not None:
        accelerator.load_state(resume_from)
        loader = accelerator.skip_first_batches(loader, SAVED_AT)
    losses = []
    for number, (x, y) in enumerate(loader, start=1):
        loss = (model(x) - y).square().mean()
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number == save_at:
            accelerator.save_state(folder)
    accelerator.end_training()
    return losses


def resumed(folder: str) -> tuple[list[float], list[float]]:
    """Return the losses of a whole epoch, and of its end after loading what `folder` holds."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return train(size), train(size, folder)


@pytest.mark.parametrize(("name", "world_size"), [("one", 1), ("tp", 2)])
def test_a_state_of_an_earlier_version_is_resumed(
    name: str, world_size: int, tmp_path: Path
) -> None:
    folder = shutil.copytree(OLDER / name, tmp_path / name)
    if world_size == 1:
        answers = [resumed(str(folder))]
    else:
        answers = run_distributed(resumed, world_size, str(folder))
    for whole, rest in answers:
        assert len(whole) == NUM_BATCHES
        expected = whole[SAVED_AT:] if world_size == 1 else REST
        assert rest == pytest.approx(expected, rel=1e-4)
