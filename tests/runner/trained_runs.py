"""A trained-looking run of the digits, made without training, for the tests that use a run."""

from __future__ import annotations

from pathlib import Path

import torch

from accel.accelerator import Accelerator
from runner.recipe import composition, hydra_setup
from runner.runs import directory
from runner.runs.job import Job
from runner.training import build
from tests.helpers import reset_accel

SMALL = ("model.dropout=0", "tracker.log_with=[]")


def make_run(folder: Path, *overrides: str, checkpoints: int = 1, best: int | None = None) -> Path:
    """Return a run directory whose checkpoint n holds weights filled from seed n.

    Args:
        folder: where runs lie.
        overrides: of the default recipe.
        checkpoints: how many there are.
        best: which of them is the best; None: the run keeps no best.
    """
    with hydra_setup.session():
        recipe = composition.require(composition.new_run([*SMALL, *overrides], "config"))
    run_dir = directory.claim(folder, recipe.name)
    Job(run_dir, overrides=(*SMALL, *overrides), cwd=str(folder)).save(recipe)
    for number in range(checkpoints):
        torch.manual_seed(number)
        step = build.build_step(recipe)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(*step.models.values(), *step.optimizers.values())
        known = None if best is None else {"step": best, "metric": "accuracy", "value": 0.9}
        accelerator.save_state(
            run_dir / "checkpoints" / f"checkpoint_{number}",
            metadata={"step": number, "best": known},
        )
        reset_accel()
    return run_dir
