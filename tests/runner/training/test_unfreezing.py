"""E3, R1: layers that a callback unfreezes train as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.builtin.optimizers import adamw
from runner.training.run import Callback
from tests.helpers import run_distributed
from tests.runner.loops import build, forget, recipe_of

UNFROZEN_AT = 4


class Unfreeze(Callback):
    """Unfreezes the first layer after a step, and gives it to the optimizer if `adds`."""

    def __init__(self, adds: bool) -> None:
        self.adds = adds

    def on_step(self, loop: Any) -> None:
        if loop.state.step == UNFROZEN_AT:
            layer = loop.accelerator.unwrap_model(loop.step.models["model"])[0]
            layer.requires_grad_(True)
            if self.adds:
                loop.step.optimizers["optimizer"].add_param_group({"params": layer.parameters()})


def train(folder: str, kind: str, adds: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first layer's weights before and after training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    makers = {"adamw": adamw, "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.02)}
    loop = build(
        Path(folder),
        recipe_of(trainer__max_steps=8, trainer__epochs=None),
        model=model,
        make_optimizer=makers[kind],
        make_scheduler=None,
        callbacks={"unfreeze": Unfreeze(adds)},
    )
    loop.run()
    after = loop.accelerator.unwrap_model(loop.step.models["model"])[0].weight.detach().clone()
    forget()
    return before, after


@pytest.mark.parametrize(("kind", "adds"), [("adamw", False), ("adamw", True), ("sgd", False)])
def test_an_unfrozen_layer_trains_where_an_optimizer_has_it(
    kind: str, adds: bool, tmp_path: Path
) -> None:
    before, after = train(str(tmp_path / "one"), kind, adds)
    assert torch.equal(before, after) is not (adds or kind == "sgd")
    for _, other in run_distributed(train, 2, str(tmp_path / "two"), kind, adds):
        torch.testing.assert_close(other, after, rtol=1e-4, atol=1e-6)
