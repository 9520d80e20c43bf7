"""Runs beside plain loops of the same, and runs that are killed and resumed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runner.training.run import Callback
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.training.test_strategies import ENGINES

STEPS = 24
STRATEGIES = {"one": 1, "ddp": 2, "fsdp": 2, "tp": 2, "zero2": 2, "zero3": 2}  # world sizes


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(4, width), nn.Dropout(0.0), nn.Tanh(), nn.Linear(width, 1)]
    return nn.Sequential(*layers)


def plain(make_optimizers: Any, make_scheduler: Any = None) -> dict[str, torch.Tensor]:
    """Return the weights that a plain loop trains; its schedule is that of the first optimizer."""
    model, data = net(), loops.Points(loops.NUM_TRAIN)
    validation = loops.Points(loops.NUM_VALIDATION)
    made = make_optimizers(model)
    scheduler = make_scheduler(made[0]) if make_scheduler else None
    for _ in range(STEPS):
        (model(data.x).squeeze(-1) - data.y).square().mean().backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = float((model(validation.x).squeeze(-1) - validation.y).square().mean())
        if scheduler:
            scheduler.step(*[loss] * isinstance(scheduler, ReduceLROnPlateau))
    return model.state_dict()


def run(folder: Path, strategy: str = "one", width: int = 8, **given: Any) -> dict[str, Any]:
    """Train with one step an epoch, so that the order of the samples changes nothing."""
    size = {"trainer__global_batch_size": loops.NUM_TRAIN, "trainer__epochs": STEPS}
    recipe = loops.recipe_of(**size, checkpoint__every_steps=5, **ENGINES.get(strategy, {}))
    return loops.run(folder, recipe, model=net(width), **{"make_scheduler": None, **given})


def trained(folder: str, strategy: str, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    run(Path(folder), strategy, **given)
    loops.forget()
    return loops.weights(Path(folder))


def check_weights(
    expected: dict[str, torch.Tensor], folder: Path, strategy: str, atol: float = 1e-6, **given: Any
) -> None:
    """Check the weights that each rank of a run has at its end."""
    for found in run_distributed(trained, STRATEGIES[strategy], str(folder), strategy, given):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=atol)


class Killer(Callback):
    """Kills its process after a step."""

    def on_step(self, loop: Any) -> None:
        if loop.state.step == 13:
            os.kill(os.getpid(), signal.SIGKILL)


def check_killed(folder: Path, **given: Any) -> None:
    """Check that a killed and resumed run has the losses, rates and weights of another."""
    whole, killed = folder / "whole", folder / "killed"
    run(whole, **given)
    kwargs = {**given, "callbacks": {"killer": Killer()}}
    process = multiprocessing.get_context("fork").Process(target=run, args=[killed], kwargs=kwargs)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    run(killed, **given, resume_from=loops.newest(killed))
    found, expected = loops.records(killed), loops.records(whole)
    names = [name for name in expected[0] if name == "loss" or name.startswith("lr")]
    assert [[r[n] for n in names] for r in found] == [[r[n] for n in names] for r in expected]
    weights = loops.weights(whole)
    assert all(torch.equal(value, weights[n]) for n, value in loops.weights(killed).items())
