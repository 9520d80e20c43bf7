"""LOMO and AdaLOMO: weights that are updated in the backward pass, and their state (E3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.machine.errors import ConfigError
from accel.machine.imports import is_lomo_available
from tests.helpers import run_distributed


class Fused(torch.optim.Optimizer):
    """The documented interface of LOMO's packages, without them: SGD with a moment."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.model, self.step_num = model, 0
        self.exp_avg_sq = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        self.exp_avg_sq_row: dict[str, torch.Tensor] = {}
        self.exp_avg_sq_col: dict[str, torch.Tensor] = {}

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        self.step_num += 1
        loss.backward()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                moment = self.exp_avg_sq[name].mul_(0.9).addcmul_(parameter.grad, parameter.grad)
                parameter -= lr / self.step_num * parameter.grad / (moment.sqrt() + 1e-8)
                parameter.grad = None


def of_package(name: str) -> Any:
    if not is_lomo_available():
        pytest.skip("lomo_optim is not installed")
    import lomo_optim

    return getattr(lomo_optim, name)


def run(kind: Any, folder: Path, steps: range, load: bool) -> torch.Tensor:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(int(load))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    model, optimizer = accelerator.prepare(model, kind(model))
    if load:
        accelerator.load_state(str(folder / "state"))
    for step in steps:
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(batch).square().mean(), learning_rate=0.05)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            accelerator.save_state(str(folder / "state"))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", ["Fused", "Lomo", "AdaLomo"])
def test_a_resumed_run_ends_as_one_that_went_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Fused if name == "Fused" else of_package(name)
    if not torch.cuda.is_available():  # AdaLOMO puts its moments there
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    end = run(kind, tmp_path, range(6), load=False)
    assert torch.equal(run(kind, tmp_path, range(3, 6), load=True), end)


def prepare() -> str:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError) as refused:
        Accelerator(cpu=True).prepare(model, Fused(model))
    return str(refused.value)


def test_gradients_that_cannot_be_averaged_are_refused() -> None:
    for text in run_distributed(prepare, 2):
        assert "Fused on 2 processes: it updates weights in the backward pass" in text
