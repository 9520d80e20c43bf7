"""Runs beside plain loops of the same, and runs that are killed and resumed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accel.checkpoint.directory import checkpoints, read_manifest
from runner.recipe.schema import Recipe
from runner.training.run import Callback
from tests.helpers import WorkerError, run_distributed
from tests.runner import loops
from tests.runner.training.test_strategies import ENGINES

STEPS = 24
TIMED = re.compile("time|per_second|slowest")  # of logged values
STATE = "custom_checkpoint_0.pkl"  # of the loop, of its callbacks and schedules
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


class Killer(Callback):
    """Kills its process after a step."""

    def __init__(self, after: int | None) -> None:
        self.after = after

    def on_step(self, loop: Any) -> None:
        if loop.state.step == self.after:
            os.kill(os.getpid(), signal.SIGKILL)


def go_on(folder: str, recipe: Recipe, killed_after: int | None = None, **given: Any) -> None:
    """Train from the newest checkpoint, or from the start where there is none.

    Args:
        folder: that of the run.
        recipe: its recipe.
        killed_after: step after which SIGKILL ends this process; None: it ends itself.
        given: further arguments of the loop.
    """
    known = checkpoints(Path(folder) / "checkpoints")
    callbacks = {**given.pop("callbacks", {}), "killer": Killer(killed_after)}
    resume = known[-1] if known else None
    loops.run(Path(folder), recipe, callbacks=callbacks, resume_from=resume, **given)
    loops.forget()


def killed(train: Callable[..., Any], num_processes: int, *args: Any, after: Any) -> list[Any]:
    """Run what SIGKILL ends on all processes, and again; return what it returns by rank.

    Args:
        train: trains by `go_on`, with `args`.
        num_processes: how many train.
        args: picklable.
        after: step after which they are killed, given as the last argument.
    """
    with pytest.raises(WorkerError, match=r"died \(exit code -9\)"):
        run_distributed(train, num_processes, *args, after)
    return run_distributed(train, num_processes, *args)


def equal_runs(one: Path, other: Path, *but: str) -> None:
    """Check that two runs have logged the same values, and have saved the same bits.

    Args:
        one: folder of a run.
        other: of another.
        but: ends of names of files that may hold the same in other bytes.
    """
    for expected, found in zip(_left(one, but), _left(other, but), strict=True):
        assert found == expected


def _left(folder: Path, but: tuple[str, ...]) -> tuple[list[dict[str, Any]], str, Any]:
    """Return what a run has logged, its last state, and digests of what it has saved beside it."""
    records = loops.records(folder) + loops.records(folder, "validation")
    logged = [{n: v for n, v in record.items() if not TIMED.search(n)} for record in records]
    files = read_manifest(loops.newest(folder)).files
    saved = {name: entry for name, entry in files.items() if not name.endswith((STATE, *but))}
    state = re.sub(r"'seconds': [\d.e-]+", "", str(torch.load(loops.newest(folder) / STATE)))
    return logged, state, saved


def train(
    folder: str, strategy: str, given: dict[str, Any], killed_after: int | None = None
) -> dict[str, torch.Tensor]:
    """Train with one step an epoch, so that the order of the samples changes nothing."""
    recipe = loops.recipe_of(
        trainer__global_batch_size=loops.NUM_TRAIN,
        trainer__epochs=STEPS,
        checkpoint__every_epochs=None,
        checkpoint__every_steps=5,
        **ENGINES.get(strategy, {}),
    )
    known = {"make_scheduler": None, "width": 8, **given}
    go_on(folder, recipe, killed_after, model=net(known.pop("width")), **known)
    return loops.weights(Path(folder))


def check_weights(
    expected: dict[str, torch.Tensor], folder: Path, strategy: str, atol: float = 1e-6, **given: Any
) -> None:
    """Check each rank's weights at a run's end, and that a killed and resumed one ends the same."""
    whole, cut = folder / "whole", folder / "cut"
    for found in run_distributed(train, STRATEGIES[strategy], str(whole), strategy, given):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=atol)
    killed(train, STRATEGIES[strategy], str(cut), strategy, given, after=13)
    equal_runs(whole, cut)
