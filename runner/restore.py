"""A run's models with the weights of one of its checkpoints, for use in Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.checkpoint import files
from accel.errors import CheckpointError, Problem
from runner import rundir
from runner.job import Job
from runner.schema import Recipe

if TYPE_CHECKING:
    from runner.step import Step

BEST = "best"
LAST = "last"


def load(
    run_dir: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> tuple[Any, Recipe]:
    """Return the trained model of a run and its recipe.

    Args:
        run_dir: the run directory.
        checkpoint: "best", "last", or the name or path of a checkpoint. None: the best, or the last
            of a run that keeps no best.

    Returns:
        The model, in eval mode on the CPU (of a step with several models: a dict of them by name),
        and the recipe that it was trained with.

    Raises:
        ConfigError: if it is no run directory, or needs a package that is not trusted here.
        CheckpointError: if there is no such checkpoint, or it is not whole.

    Example:
        >>> model, cfg = runner.load("runs/digits/20260101-120000-1a2b")
    """
    job, recipe = Job.load(rundir.existing(run_dir))
    step = restored_step(job.run_dir, recipe, checkpoint)
    models = dict(step.models)
    return (next(iter(models.values())) if len(models) == 1 else models), recipe


def restored_step(
    run_dir: Path, recipe: Recipe, checkpoint: str | os.PathLike[str] | None = None
) -> Step:
    """Return the step of a recipe, its models in eval mode and with the weights of a checkpoint.

    The random generators are afterwards as they were.

    Raises:
        CheckpointError: if there is no such checkpoint, it is not whole, or it does not fit.
    """
    from accel.checkpoint.common import read_model
    from accel.rng import preserved
    from runner import build

    path = find_checkpoint(run_dir, checkpoint)
    files.verify(path)
    with preserved():
        step = build.build_step(recipe)
    for index, (name, model) in enumerate(step.models.items()):
        try:
            model.load_state_dict(read_model(path, index))
        except RuntimeError as error:
            rule = f"its weights do not fit the model {name!r} of the recipe: {error}"
            remedy = "Leave the overrides of the model out."
            raise files.broken(path, rule, remedy) from error
        model.eval()
    return step


def find_checkpoint(run_dir: Path, which: str | os.PathLike[str] | None = None) -> Path:
    """Return the checkpoint of a run that "best", "last", a name or a path means.

    Args:
        run_dir: the run directory.
        which: None: the best, or the last of a run that keeps no best.

    Raises:
        CheckpointError: if there is none.
    """
    folder = rundir.checkpoint_folder(run_dir)
    if which == BEST or which is None:
        best = _best(folder)
        if best is not None or which == BEST:
            return _existing(best, run_dir, BEST)
    if which in (LAST, None):
        return _existing(files.newest_complete(folder), run_dir, LAST)
    path = Path(which)
    inside = folder / path
    return _existing(inside if inside.is_dir() else path.absolute(), run_dir, os.fspath(path))


def _best(folder: Path) -> Path | None:
    from runner.saving import read_best

    best = read_best(folder)
    return None if best is None else folder / best.checkpoint


def _existing(path: Path | None, run_dir: Path, which: str) -> Path:
    if path is None or not path.is_dir():
        rule = "the run has no such checkpoint"
        remedy = f"Choose {BEST}, {LAST} or a folder in {rundir.checkpoint_folder(run_dir)}."
        raise CheckpointError(str(Problem(f"checkpoint {which!r} of {run_dir}", rule, remedy)))
    return path
