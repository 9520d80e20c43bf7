"""Saving and loading a whole run: every object of an `Accelerator`, on every rank.

Its phases are taken together: a failure on one rank raises on all of them before the next begins.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel import rng
from accel.checkpoint import accelerate_format, directory, disk_space
from accel.checkpoint.dataloader_matching import describe, match
from accel.checkpoint.dataloader_state import (
    load_loader_state,
    load_positions,
    loader_state,
    positions,
)
from accel.checkpoint.directory import Manifest, numbered
from accel.checkpoint.optimizer_state import ParameterNames
from accel.checkpoint.serialization import load_plain, read_model, save_plain, write_model
from accel.comm.all_or_none import decided, together
from accel.errors import CheckpointError, Problem
from accel.logging import get_logger

if TYPE_CHECKING:
    from accel.accelerator import Accelerator

logger = get_logger(__name__)

AnyPath = str | PathLike[str]
Hook = Callable[..., None]


@dataclass(frozen=True)
class SaveOptions:
    """How a state is written.

    Args:
        safe: whether weights are safetensors, else `torch.save`.
        metadata: what the manifest tells of the run: step, sample counter, …
        protected: checkpoints that `total_limit` must not delete.
        hooks: called as ``hook(models, weights, folder)`` before anything is written.
    """

    safe: bool = True
    metadata: Mapping[str, Any] | None = None
    protected: Iterable[AnyPath] = ()
    hooks: Iterable[Hook] = ()


@dataclass(frozen=True)
class LoadOptions:
    """How a state is read.

    Args:
        strict: whether every weight of models and checkpoint must match.
        trust_unverified: whether a directory without a manifest is read, too.
        hooks: called as ``hook(models, folder)`` before anything is loaded.
    """

    strict: bool = True
    trust_unverified: bool = False
    hooks: Iterable[Hook] = ()


@dataclass(frozen=True)
class Saved:
    """A checkpoint to load.

    Args:
        path: its directory.
        manifest: what it consists of.
        foreign: whether it has no manifest of its own.
    """

    path: Path
    manifest: Manifest
    foreign: bool

    def plain(self, name: str) -> Any:
        """Return what the file `name` holds."""
        return load_plain(self.path / name, pickled_arrays=self.foreign)


def writes(accelerator: Accelerator) -> bool:
    """Return whether this rank writes what all ranks share."""
    plan = accelerator.plan
    return (plan.local_rank if plan.project.save_on_each_node else plan.rank) == 0


# -- save ----------------------------------------------------------------------------------


def save(accelerator: Accelerator, output_dir: AnyPath | None, options: SaveOptions) -> Path:
    """Write the state of `accelerator` and return the committed directory.

    Raises:
        CheckpointError: on every rank, if it failed on any; older checkpoints are untouched.
    """
    comm, project = accelerator.comm, accelerator.plan.project
    if project.automatic_checkpoint_naming and output_dir is not None:
        logger.warning(
            "save_state(%r): under automatic naming states go to %s.",
            fspath(output_dir),
            folder_of(accelerator),
        )
    final = decided(comm, lambda: _save_path(accelerator, output_dir), "save_state")
    path = _require(final)
    _warn_of_open_window(accelerator)
    _write_and_commit(accelerator, path, options)
    if project.automatic_checkpoint_naming:
        project.iteration += 1  # it is committed, whatever becomes of the old ones
        if project.total_limit is not None:
            with together(comm, "deleting old checkpoints"):
                if writes(accelerator):
                    directory.prune(path.parent, project.total_limit, options.protected)
    return path


def _warn_of_open_window(accelerator: Accelerator) -> None:
    """Tell that gradients are not saved, where a window of micro-batches has only begun."""
    num_steps = accelerator.gradient_accumulation_steps
    begun = accelerator.step % num_steps
    if begun and not accelerator.sync_gradients:
        logger.warning_once(
            "save_state after %d of %d micro-batches of a window: gradients are not saved, so a "
            "run that resumes makes the next step without them. Save where "
            "accelerator.sync_gradients is true.",
            begun,
            num_steps,
        )


def _require(path: Path | None) -> Path:
    if path is None:
        rule = "a checkpoint needs a place"
        remedy = (
            "Name a directory, or pass ProjectConfiguration(project_dir=…, "
            "automatic_checkpoint_naming=True)."
        )
        raise CheckpointError(Problem("no directory was given", rule, remedy))
    return path


def folder_of(accelerator: Accelerator) -> Path | None:
    """Return where automatically named checkpoints lie; None where they are not named so."""
    project = accelerator.plan.project
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        return None
    return Path(project.project_dir) / directory.FOLDER


def _save_path(accelerator: Accelerator, output_dir: AnyPath | None) -> Path | None:
    project = accelerator.plan.project
    if not project.automatic_checkpoint_naming:
        return None if output_dir is None else Path(output_dir).expanduser().absolute()
    folder = folder_of(accelerator)
    if folder is None:
        return None
    path = folder.absolute() / f"checkpoint_{project.iteration}"
    if path.exists():
        remedy = (
            "Go on from it with load_state(), set ProjectConfiguration(iteration=…) to a free "
            "number, or choose another project_dir."
        )
        raise directory.broken(path, "automatic naming never overwrites a checkpoint", remedy)
    return path


def _write_and_commit(accelerator: Accelerator, final: Path, options: SaveOptions) -> None:
    comm, is_writer = accelerator.comm, writes(accelerator)
    staged = _stage(accelerator, final)
    try:
        with together(comm, f"writing {final}"):
            _write(accelerator, staged, options)
        with together(comm, f"committing {final}"), _room_for(final):
            if is_writer:
                directory.seal(staged, _facts(accelerator), options.metadata or {})
                directory.publish(staged, final)
    except BaseException:
        # A sealed directory may be half moved into its place: `files.repair` finishes that.
        if is_writer and not (staged / directory.MANIFEST).exists():
            directory.discard(staged)
        raise


def _stage(accelerator: Accelerator, final: Path) -> Path:
    """Create the directory that this rank writes in, and see that every rank has one."""
    comm, is_writer = accelerator.comm, writes(accelerator)
    mine: Path | None = None
    with together(comm, f"creating {final}"):
        if is_writer:
            directory.tidy(final)
    try:
        with together(comm, f"creating {final}"):
            mine = directory.stage(final) if is_writer else None
        created = comm.all_gather_object(None if mine is None else fspath(mine))
        with together(comm, f"creating {final}"):
            return _own_folder(created, comm.rank, final)
    except CheckpointError:
        if mine is not None:
            directory.discard(mine)
        raise


def _own_folder(created: list[str | None], rank: int, final: Path) -> Path:
    """Return the directory that the writer of this rank's node created, and this rank sees."""
    writers = [writer for writer, path in enumerate(created) if path is not None]
    own = max(writer for writer in writers if writer <= rank)
    found = {writer: Path(created[writer] or "") for writer in writers}
    if not found[own].is_dir():
        remedy = "Use a disk that all nodes share, or ProjectConfiguration(save_on_each_node=True)."
        raise directory.broken(final, f"rank {rank} does not see what rank {own} created", remedy)
    if any(found[writer].is_dir() for writer in writers if writer != own):
        rule = "save_on_each_node=True on a disk that nodes share lets them overwrite each other"
        raise directory.broken(final, rule, "Set save_on_each_node=False.")
    return found[own]


def _facts(accelerator: Accelerator) -> dict[str, Any]:
    objects = accelerator._objects
    return {
        "world_size": accelerator.comm.world_size,
        "dp_size": accelerator.parallel_dims.dp_size,
        "dp_leaders": accelerator.parallel_dims.dp_leaders,
        "strategy": accelerator.strategy.traits.name,
        "mixed_precision": accelerator.plan.mixed_precision,
        "torch": str(torch.__version__),
        "iteration": accelerator.plan.project.iteration,
        "accumulation_step": accelerator.step,
        "objects": {kind: len(getattr(objects, kind)) for kind in vars(objects)},
        "dataloaders": [describe(loader) for loader in objects.dataloaders],
    }


def _write(accelerator: Accelerator, folder: Path, options: SaveOptions) -> None:
    objects, strategy = accelerator._objects, accelerator.strategy
    with strategy.portable():
        weights = [strategy.model_state(model) for model in objects.models]
    # On every rank: what is sharded is gathered from all of them.
    states = list(_shared_states(accelerator))
    remaining = list(weights)
    everything = [weights, [state for _, state, _ in states]]
    with _room_for(folder, lambda: disk_space.size_of(everything)):
        _write_states(accelerator, folder, options, weights, remaining, states)


def _room_for(
    folder: Path, needed: Callable[[], int] = lambda: 0
) -> contextlib.AbstractContextManager[None]:
    remedy = (
        f"{disk_space.REMEDY} (ProjectConfiguration(project_dir=…)), or keep fewer checkpoints "
        "(ProjectConfiguration(total_limit=…))."
    )
    return disk_space.told("the checkpoint", folder.parent, needed, remedy)


def _write_states(
    accelerator: Accelerator,
    folder: Path,
    options: SaveOptions,
    weights: list[Any],
    remaining: list[Any],
    states: list[tuple[str, Any, str]],
) -> None:
    objects = accelerator._objects
    for hook in options.hooks:
        hook(list(objects.models), remaining, fspath(folder))
    if writes(accelerator):
        for index, state in _indexed(remaining, weights, "save_state"):
            write_model(state, folder, index, options.safe)
        for name, state, what in states:
            save_plain(state, folder / name, what)
    rank = accelerator.comm.rank
    save_plain(rng.capture(), folder / directory.random_states_name(rank), "random states")
    for index, position in enumerate(positions(objects.dataloaders)):
        if position is not None:
            path = folder / directory.positions_name(rank, index)
            save_plain(position, path, f"data loader {index}")


def _indexed(remaining: list[Any], every: list[Any], what: str) -> list[tuple[int, Any]]:
    """Return (index among `every`, entry) of the entries that hooks left in `remaining`."""
    if len(remaining) == len(every):
        return list(enumerate(remaining))
    positions = {id(entry): index for index, entry in enumerate(every)}
    if any(id(entry) not in positions for entry in remaining):
        rule = "a hook takes entries out of the list, or replaces them all"
        raise CheckpointError(
            str(Problem(f"a pre-hook of {what} added to the list", rule, "Do so."))
        )
    return [(positions[id(entry)], entry) for entry in remaining]


def _shared_states(accelerator: Accelerator) -> Iterator[tuple[str, Any, str]]:
    """Yield (file name, state, what it is) of everything but weights and random states."""
    objects = accelerator._objects
    names = _parameter_names(accelerator)
    for index, optimizer in enumerate(objects.optimizers):
        state = accelerator.strategy.optimizer_state(optimizer, names)
        yield numbered("optimizer", ".bin", index), state, f"optimizer {index}"
    for index, scheduler in enumerate(objects.schedulers):
        yield numbered("scheduler", ".bin", index), scheduler.state_dict(), f"scheduler {index}"
    for index, loader in enumerate(objects.dataloaders):
        yield numbered("sampler", ".bin", index), loader_state(loader), f"data loader {index}"
    if accelerator.scaler is not None:
        yield directory.SCALER, accelerator.scaler.state_dict(), "gradient scaler"
    for index, custom in enumerate(objects.custom):
        what = f"registered object {index} ({type(custom).__name__})"
        yield directory.custom_name(index), custom.state_dict(), what


def _parameter_names(accelerator: Accelerator) -> ParameterNames:
    unwrap = accelerator.strategy.unwrap_model
    return ParameterNames([unwrap(model) for model in accelerator._objects.models])


# -- load ----------------------------------------------------------------------------------


def load(accelerator: Accelerator, input_dir: AnyPath | None, options: LoadOptions) -> Path:
    """Restore the state of `accelerator` and return the directory that it came from.

    Raises:
        CheckpointError: on every rank, if it failed on any. Objects may then be partly restored.
    """
    comm = accelerator.comm
    path = _require(decided(comm, lambda: _load_path(accelerator, input_dir), "load_state"))
    with together(comm, f"verifying {path}"):
        if accelerator.plan.local_rank == 0:
            directory.repair(path)
            _verify(path, options.trust_unverified)
    with together(comm, f"loading {path}"):
        saved = _saved(path)
        _check_counts(accelerator, saved)
        models = list(accelerator._objects.models)
        for hook in options.hooks:
            hook(models, fspath(path))
        _restore_models(accelerator, saved, models, options.strict)
        loaders = _matched(accelerator, saved)
        _restore_objects(accelerator, saved, loaders)
        _restore_positions(accelerator, saved, loaders)
        _restore_random_states(accelerator.parallel_dims.dp_rank, saved)
    _continue_numbering(accelerator, path)
    return path


def _verify(path: Path, trusted: bool) -> None:
    if not accelerate_format.is_documented(path):
        directory.verify(path)
    elif trusted:
        logger.warning(
            "%s has no %s: its files could not be verified. Data loaders begin their order anew.",
            path,
            directory.MANIFEST,
        )
    else:
        rule = f"it has no {directory.MANIFEST}: it was cut off, or another library wrote it"
        remedy = (
            "If you know that it is whole, pass load_state(…, trust_unverified=True): it is read "
            "without running code. The next save_state writes a directory that can be verified."
        )
        raise directory.broken(path, rule, remedy)


def _saved(path: Path) -> Saved:
    if accelerate_format.is_documented(path):
        return Saved(path, accelerate_format.describe(path), foreign=True)
    return Saved(path, directory.read_manifest(path), foreign=False)


def _load_path(accelerator: Accelerator, input_dir: AnyPath | None) -> Path | None:
    if input_dir is not None:
        return Path(input_dir).expanduser().absolute()
    folder = folder_of(accelerator)
    if folder is None:
        return None
    newest = directory.newest_complete(folder.absolute())
    if newest is None:
        raise directory.broken(folder, "no complete checkpoint lies there", "Save one first.")
    return newest


def _check_counts(accelerator: Accelerator, checkpoint: Saved) -> None:
    """Refuse a checkpoint that lacks what this run trains; what it has besides is not loaded."""
    saved = checkpoint.manifest.engine["objects"]
    lacking = [
        f"{saved.get(kind, 0)} of {len(found)} {kind}"
        for kind, found in vars(accelerator._objects).items()
        if len(found) > saved.get(kind, 0) and kind != "dataloaders"  # a new one starts anew
    ]
    if lacking:
        remedy = "Prepare and register the same objects as when it was saved."
        raise directory.broken(checkpoint.path, f"it holds only {', '.join(lacking)}", remedy)


def _restore_models(
    accelerator: Accelerator, saved: Saved, models: list[Any], strict: bool
) -> None:
    strategy = accelerator.strategy
    for index, model in _indexed(models, accelerator._objects.models, "load_state"):
        state = read_model(saved.path, index)
        if saved.foreign:
            state = accelerate_format.complete(strategy.unwrap_model(model), state)
        try:
            strategy.load_model_state(model, state, strict=strict)
        except RuntimeError as error:
            rule = f"its weights do not fit model {index} ({type(model).__name__}): {error}"
            remedy = "Build the model as it was when it was saved, or pass strict=False."
            raise directory.broken(saved.path, rule, remedy) from error


def _restore_objects(
    accelerator: Accelerator, saved: Saved, loaders: list[tuple[Any, int]]
) -> None:
    objects = accelerator._objects
    names = _parameter_names(accelerator)
    for index, optimizer in enumerate(objects.optimizers):
        state = saved.plain(numbered("optimizer", ".bin", index))
        if saved.foreign and accelerate_format.is_by_position(state):
            optimizer.load_state_dict(state)
        else:
            accelerator.strategy.load_optimizer_state(optimizer, state, names)
    for index, scheduler in enumerate(objects.schedulers):
        scheduler.load_state_dict(saved.plain(numbered("scheduler", ".bin", index)))
    if not saved.foreign:
        for loader, index in loaders:
            load_loader_state(loader, saved.plain(numbered("sampler", ".bin", index)))
    if accelerator.scaler is not None:
        _restore_scaler(accelerator.scaler, saved)
    for index, custom in enumerate(objects.custom):
        custom.load_state_dict(saved.plain(directory.custom_name(index)))
    accelerator.step = int(saved.manifest.engine["accumulation_step"])


def _matched(accelerator: Accelerator, saved: Saved) -> list[tuple[Any, int]]:
    """Return the loaders that were saved, each with the index of its state."""
    engine, loaders = saved.manifest.engine, accelerator._objects.dataloaders
    if saved.foreign:  # whose loaders have no states
        return [(loader, index) for index, loader in enumerate(loaders)]
    indices = match(loaders, engine.get("dataloaders", engine["objects"].get("dataloaders", 0)))
    new = [position for position, index in enumerate(indices) if index is None]
    if new:
        logger.warning(
            "The checkpoint %s holds no state of data loader %s (in the order of prepare): its "
            "order starts as in a new run.",
            saved.path,
            ", ".join(map(str, new)),
        )
    return [(one, i) for one, i in zip(loaders, indices, strict=True) if i is not None]


def _restore_scaler(scaler: torch.amp.GradScaler, saved: Saved) -> None:
    if directory.SCALER in saved.manifest.files:
        scaler.load_state_dict(saved.plain(directory.SCALER))
        return
    logger.warning(
        "The checkpoint %s was saved under precision %r, without a gradient scaler: this run's "
        "starts at its initial scale.",
        saved.path,
        saved.manifest.engine["mixed_precision"],
    )


def _restore_positions(
    accelerator: Accelerator, saved: Saved, loaders: list[tuple[Any, int]]
) -> None:
    comm = accelerator.comm
    names = [directory.positions_name(comm.rank, index) for _, index in loaders]
    # Where data is shared out otherwise a rank reads other samples: its old position means nothing.
    here = comm.world_size, accelerator.parallel_dims.dp_size
    same = here == (saved.manifest.engine["world_size"], saved.manifest.dp_size)
    present = [saved.plain(n) if same and n in saved.manifest.files else None for n in names]
    load_positions(comm, [loader for loader, _ in loaders], present)


def _restore_random_states(dp_rank: int, saved: Saved) -> None:
    """Restore the random states that the saved run had on the same data-parallel rank.

    Ranks that compute the same samples (tensor parallelism) must draw the same.
    """
    present = saved.manifest.files
    name = directory.random_states_name(dict(enumerate(saved.manifest.dp_leaders)).get(dp_rank, -1))
    if name in present:
        rng.restore(accelerate_format.random_states(saved.plain(name)))
        return
    # The data-parallel size was smaller: a stream of its own, the same at each load.
    root = present[min(n for n in present if n.startswith("random_states_"))].sha256
    rng.set_seed(int(hashlib.sha256(f"{root}:{dp_rank}".encode()).hexdigest()[:8], 16))


def _continue_numbering(accelerator: Accelerator, path: Path) -> None:
    """Give the next checkpoint a number above the loaded one's and above any that exists."""
    project, folder = accelerator.plan.project, folder_of(accelerator)
    if folder is None:
        return

    def taken() -> list[int]:
        present = [directory.iteration_of(p) for p in [path, *directory.checkpoints(folder)]]
        return [number for number in present if number is not None]

    (numbers,) = accelerator.comm.broadcast_objects([taken()])
    project.iteration = max([project.iteration, *(number + 1 for number in numbers)])
