"""A run's models with the weights of one of its checkpoints, for use in Python.

Free of torch until a model is loaded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import CheckpointError, ConfigError, Problem
from runner.recipe.schema import Recipe
from runner.runs import directory, environment, provenance
from runner.runs.job import Job
from runner.runs.json_files import Fields

if TYPE_CHECKING:
    import torch

    from runner.training.step import Step


logger = logging.getLogger(__name__)

BEST = "best"
LAST = "last"


class NoCheckpointError(ConfigError, CheckpointError):
    """A run that is to be evaluated has no checkpoint: the request is refused."""


def load(
    run_dir: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> tuple[Any, Recipe]:
    """Return the trained model of a run and its recipe.

    Args:
        run_dir: the run directory.
        checkpoint: "best", "last", or the name or path of a checkpoint. None: the best, or the last
            of a run that keeps no best, or whose best is damaged.

    The checkpoint, and whether the project's code has changed since, are printed on standard error.

    Returns:
        The model, in eval mode on the CPU (of a step with several models: a dict of them by name),
        and the recipe that it was trained with.

    Raises:
        ConfigError: if it is no run directory, or needs a package that is not trusted here.
        CheckpointError: if the checkpoint is missing or incomplete.

    Example:
        >>> model, cfg = runner.load("runs/digits/20260101-120000-1a2b")
    """
    job, recipe = Job.load(directory.existing(run_dir))
    path = find_checkpoint(job.run_dir, checkpoint)
    step = restored_step(path, recipe)
    print(f"runner.load: the weights of {described(path, job.run_dir)}", file=sys.stderr)
    for line in other_code(environment.recorded(job.run_dir)):
        print(f"runner.load: {line}", file=sys.stderr)
    models = dict(step.models)
    return (next(iter(models.values())) if len(models) == 1 else models), recipe


def restored_step(
    path: Path, recipe: Recipe, placement: Placement | None = None, folder: Path = Path()
) -> Step:
    """Return the step of a recipe, its models in eval mode and with the weights of a checkpoint.

    The random generators are afterwards as they were. `placement` tells where weights lie that no
    device has room for, some in `folder`; the recipe's model is then built without memory.

    Raises:
        CheckpointError: if the checkpoint does not fit, or is of adapters on another base.
        ConfigError: if adapters are to be placed.
    """
    from accel import init_empty_weights
    from accel.checkpoint.load import read_model
    from accel.comm.rng import preserved
    from runner.training import base_weights, build

    with preserved():
        step = build.build_step(recipe, None if placement is None else init_empty_weights())
    base_weights.require_same(step.models, path)
    if placement is not None and base_weights.named(step.models):
        rule = "the weights of the base are not in the checkpoint, and have to be in memory"
        raise ConfigError.of(f"--device-map {placement.device_map}", rule, "Leave it out.")
    for index, (name, model) in enumerate(step.models.items()):
        try:
            if placement is not None:
                placement.load(model, path, index, folder)
            else:
                model.load_state_dict(read_model(path, index))
        except (RuntimeError, CheckpointError) as error:
            rule = f"its weights do not fit the model {name!r} of the recipe: {error}"
            remedy = "Leave the overrides of the model out."
            raise checkpoints.broken(path, rule, remedy) from error
        model.eval()
    return step


def find_checkpoint(run_dir: Path, which: str | os.PathLike[str] | None = None) -> Path:
    """Return the checkpoint of a run that "best", "last", a name or a path means; it is complete.

    Without `which`: the best, or the last of a run that keeps no best or, with a warning, whose
    best is damaged.

    Raises:
        CheckpointError: if it lacks the one that is asked for, or that is incomplete; a
            `NoCheckpointError` if it has none at all.
    """
    folder = directory.checkpoint_folder(run_dir)
    if which not in (None, BEST, LAST):
        inside = folder / str(which)
        path = inside if inside.is_dir() else Path(which).absolute()
        if not path.is_dir():
            raise _missing(run_dir, os.fspath(which))
        checkpoints.verify(path)
        return path
    if not directory.own_checkpoints(run_dir):
        remedy = "Train it first, or name a checkpoint with --checkpoint PATH."
        raise NoCheckpointError.of(str(run_dir), f"the run has no checkpoint in {folder}", remedy)
    best = None if which == LAST else best_of(run_dir)
    if best is not None:
        try:
            checkpoints.verify(best)
        except CheckpointError as error:
            if which == BEST:
                raise
            told = checkpoints.without_remedy(error)
            logger.warning("The best state is skipped. %s", told)
        else:
            return best
    elif which == BEST:
        raise _missing(run_dir, BEST)
    last = checkpoints.newest_complete(folder)
    if last is None:
        rule = f"the run has no complete checkpoint in {folder}"
        remedy = "Restore its files from a copy, or train the run again."
        raise CheckpointError(Problem(str(run_dir), rule, remedy))
    return last


def _missing(run_dir: Path, which: str) -> CheckpointError:
    remedy = f"Choose {BEST}, {LAST} or a folder in {directory.checkpoint_folder(run_dir)}."
    rule = "the run has no such checkpoint"
    return CheckpointError(Problem(f"checkpoint {which!r} of {run_dir}", rule, remedy))


def step_of(path: Path) -> int | None:
    """Return the optimizer step of a checkpoint; None: it does not say."""
    try:
        found = checkpoints.read_manifest(path).metadata.get("step")
    except CheckpointError:  # a state that the runner did not write
        return None
    return found if isinstance(found, int) else None


def described(path: Path, run_dir: Path) -> str:
    """Return e.g. "runs/digits/…/checkpoints/checkpoint_3 (step 60, the best)"."""
    step = step_of(path)
    words = [] if step is None else [f"step {step}"]
    if path == best_of(run_dir):
        words.append("the best")
    return f"{path} ({', '.join(words)})" if words else str(path)


def best_of(run_dir: Path) -> Path | None:
    """Return the checkpoint with the best state of a run; None: it keeps none."""
    from runner.training.checkpointing import best_checkpoint

    return best_checkpoint(directory.checkpoint_folder(run_dir))


def other_code(recorded: Fields) -> list[str]:
    """Return how the project's code differs from that which a run was trained with last.

    By its packages' Python files; by git, too, where some are too large. A commit that leaves them
    alone is no difference. `recorded` is the run's environment; empty where it is missing.
    """
    then = recorded.get("code") or {}
    now = provenance.package_digests(then)
    known = {name: one for name, one in now.items() if one and then[name]}
    lines = provenance.code_differences({"code": then}, {"code": known})
    if len(known) < len(then):
        state = provenance.git_state(os.getcwd())
        lines += provenance.code_differences({"git": recorded.get("git")}, {"git": state})
    return [f"code: not as it was trained with: {line}" for line in lines]


def other_data(recorded: Fields, files: Fields, given: Iterable[str]) -> list[str]:
    """Return how data files differ from those that a run had.

    Args:
        recorded: as `other_code` takes it.
        files: the states of the files that the data factory is given now, by dotted key.
        given: keys that the command has changed; what lies below them is not compared.
    """
    lines = environment.data_differences(recorded, {"data": files}, list(given))
    return [f"data: not as it was trained with: {line}" for line in lines]


# -- models that are larger than a device --------------------------------------------------


WORDS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model that is larger than a device are to lie.

    Attributes:
        device_map: how devices are filled, a word of `accel.load_checkpoint_and_dispatch`.
        max_memory: text such as "2GB" by device, its number or "cpu"; empty: what is free.
    """

    device_map: str
    max_memory: Mapping[int | str, str] = field(default_factory=dict)

    def load(self, model: torch.nn.Module, checkpoint: Path, index: int, folder: Path) -> None:
        """Load the `index`-th model of a checkpoint and hook it to run from where its weights lie.

        Weights of a safetensors file are read where they lie; those of a sharded state are written
        into the folder first, by way of memory.

        Args:
            model: on the meta device but for its buffers.
            checkpoint: a state of the run.
            index: number of the model.
            folder: gets the weights on disk that cannot be read from the checkpoint.

        Raises:
            CheckpointError: if the weights do not fit, or hold values that are no tensors.
            ConfigError: if no device has room for a part of the model that stays together.
        """
        from accel import load_checkpoint_and_dispatch

        load_checkpoint_and_dispatch(
            model,
            _exported(checkpoint, index, folder / f"model_{index}"),
            device_map=self.device_map,
            max_memory=self._memory(),
            no_split_module_classes=getattr(model, "_no_split_modules", None) or None,
            offload_folder=folder / f"offloaded_{index}",
            force_hooks=True,
            strict=True,
        )

    def _memory(self) -> dict[int | str, float | str] | None:
        """Return the limits, with what is free of memory where only accelerators have one."""
        if not self.max_memory:
            return None
        from accel.utils import get_max_memory

        return {"cpu": get_max_memory()["cpu"], **self.max_memory}


def _exported(checkpoint: Path, index: int, folder: Path) -> Path:
    """Return where the weights of a model lie as safetensors; written to `folder` if need be."""
    from accel.checkpoint import export
    from accel.checkpoint.load import read_model
    from accel.checkpoint.serialization import holds_tensors_alone

    if holds_tensors_alone(checkpoint, index):
        return checkpoint / checkpoints.model_name(index)
    export.export_model(read_model(checkpoint, index), folder)
    return folder


def parse_limits(limits: Sequence[str]) -> dict[int | str, str]:
    """Return the text by device of limits such as "0=20GB" and "cpu=4GB".

    Raises:
        ConfigError: naming the first that is no such limit.
    """
    from accel.utils import convert_file_size_to_int

    found: dict[int | str, str] = {}
    for limit in limits:
        device, _, size = limit.partition("=")
        try:
            convert_file_size_to_int(size)
            known = device in ("cpu", "mps") or device.isdecimal()
        except ConfigError:
            known = False
        place: int | str = int(device) if device.isdecimal() else device
        if not known or place in found:
            rule = "a limit is DEVICE=SIZE, one for a device; a device is the number of an "
            rule += "accelerator, or cpu, and a size has a unit (MB, GB, GiB)"
            raise ConfigError.of(f"--max-memory {limit}", rule, "Give --max-memory cpu=4GB, say.")
        found[place] = size
    return found
