"""Load the weights that a new run begins with, `init_from` of its recipe.

They are loaded into prepared models, so that each strategy shards them as it does a checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.checkpoint import directory as checkpoints
from accel.checkpoint.load import complete, read_model
from accel.machine.errors import ConfigError, Problems
from accel.weights import files
from runner.recipe.schema import InitFrom
from runner.runs import directory
from runner.training.checkpointing import best_checkpoint
from runner.training.parameter_names import matching

if TYPE_CHECKING:
    from runner.training.run import Run


def load(run: Run) -> None:
    """Load the weights of `init_from`, and tell what was loaded and what was not.

    Raises:
        ConfigError: if a pattern or all of the weights match nothing or, where it is strict, any
            weight is left.
        CheckpointError: if the weights cannot be read.
    """
    if run.recipe.init_from is None:
        return
    settings, io = InitFrom.of(run.recipe.init_from), run.accelerator.strategy.state
    place, read = _source(Path(settings.path).expanduser())
    models, problems, live, given = {}, Problems(), dict[str, Any](), dict[str, Any]()
    for index, (key, model) in enumerate(run.step.models.items()):
        prefix = f"{key}." if len(run.step.models) > 1 else ""
        models[prefix] = model
        live |= {prefix + name: v for name, v in io.sharded_model_state(model).items()}
        state = complete(io.unwrap(model), read(index))
        given |= {prefix + name: value for name, value in state.items()}
    chosen = matching(live | given, settings.include or "*", "init_from.include", problems)
    chosen -= matching(live | given, settings.exclude, "init_from.exclude", problems)
    problems.raise_if()
    both = [name for name in live if name in chosen and name in given]
    loaded = [
        n for n in both if getattr(live[n], "shape", None) == getattr(given[n], "shape", None)
    ]
    rest = {
        "missing": [name for name in live if name in chosen and name not in given],
        "unexpected": [name for name in given if name in chosen and name not in live],
        "of other shape": [name for name in both if name not in loaded],
    }
    parts = [
        f"{len(names)} {kind}: {', '.join(names[:4])}" for kind, names in rest.items() if names
    ]
    text = "; ".join([f"{len(loaded)} weights of {place} loaded", *parts])
    if not loaded or (settings.strict and parts):
        remedy = "Choose names with init_from.include and .exclude, or another file."
        raise ConfigError.of(f"init_from={settings.path}", text, remedy)
    for prefix, model in models.items():
        own = {n.removeprefix(prefix): given[n] for n in loaded if n.startswith(prefix)}
        io.load_model_state(model, own, strict=False)
    run.display.note(f"{text}.")


def _source(path: Path) -> tuple[Path, Callable[[int], dict[str, Any]]]:
    """Return what is read, and what returns the state dict of a model by its number."""
    if path.is_dir() and directory.is_run(path):
        folder = directory.checkpoint_folder(path)
        path = best_checkpoint(folder) or checkpoints.newest_complete(folder) or folder
    if (path / checkpoints.MANIFEST).is_file():
        checkpoints.verify(path)
        return path, lambda index: read_model(path, index)
    source = files.find(path)
    state = {name: value for part in source.parts() for name, value in part.items()}
    return path, lambda index: {} if index else state
