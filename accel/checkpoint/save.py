"""Saving a run: every prepared and registered object, on every rank.

Its phases are all or none: a failure on one rank raises on all of them before the next begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import fspath
from pathlib import Path
from typing import Any

import torch

from accel.checkpoint import directory, disk_full
from accel.checkpoint.contents import AnyPath, Hook, RunObjects, hooked, require_path
from accel.checkpoint.directory import numbered
from accel.checkpoint.loaders import describe, positions
from accel.checkpoint.serialization import save_plain, write_model
from accel.comm import rng
from accel.comm.base import decided, together
from accel.logging import get_logger
from accel.machine.errors import CheckpointError, Problem

logger = get_logger(__name__)


@dataclass(frozen=True)
class SaveOptions:
    """How a state is written: arguments of `save_state`, and the hooks that are called first."""

    safe: bool = True
    metadata: Mapping[str, object] | None = None
    protected: Iterable[AnyPath] = ()
    hooks: Iterable[Hook] = ()


def save(run: RunObjects, output_dir: AnyPath | None, options: SaveOptions) -> Path:
    """Write the state of `run` and return the committed directory.

    Raises:
        CheckpointError: on every rank, if it failed on any; older checkpoints are untouched.
    """
    comm, project = run.comm, run.plan.project
    if project.automatic_checkpoint_naming and output_dir is not None:
        logger.warning(
            "save_state(%r): under automatic naming states go to %s.",
            fspath(output_dir),
            run.folder,
        )
    with together(comm, "save_state"):
        _check_disk(run)
    final = decided(comm, lambda: _save_path(run, output_dir), "save_state")
    path = require_path(final)
    _warn_of_open_window(run)
    _write_and_commit(run, path, options)
    if project.automatic_checkpoint_naming:
        project.iteration += 1  # it is committed, whatever becomes of the old ones
        if project.total_limit is not None:
            with together(comm, "deleting old checkpoints"):
                if run.writes:
                    directory.prune(path.parent, project.total_limit, options.protected)
    return path


def _check_disk(run: RunObjects) -> None:
    """Refuse sharded state on the disks of several nodes: all of it describes one folder."""
    plan = run.plan
    several = plan.local_world_size < plan.world_size
    if plan.project.save_on_each_node and several and run.strategy.state.saves_shards:
        raise CheckpointError(
            Problem(
                "save_on_each_node=True with state_dict_type='SHARDED_STATE_DICT'",
                "the shards of all ranks make up one folder, on a disk that all nodes share",
                "Set save_on_each_node=False on such a disk, or state_dict_type='FULL_STATE_DICT'.",
            )
        )


def _warn_of_open_window(run: RunObjects) -> None:
    """Tell that gradients are not saved, where a window of micro-batches has only begun."""
    num_steps = run.accumulation.gradient_accumulation_steps
    begun = run.accumulation.step % num_steps
    if begun and not run.accumulation.sync_gradients:
        logger.warning_once(
            "save_state after %d of %d micro-batches of a window: gradients are not saved, so a "
            "run that resumes makes the next step without them. Save where "
            "accelerator.sync_gradients is true.",
            begun,
            num_steps,
        )


def _save_path(run: RunObjects, output_dir: AnyPath | None) -> Path | None:
    project = run.plan.project
    if not project.automatic_checkpoint_naming:
        return None if output_dir is None else Path(output_dir).expanduser().absolute()
    folder = run.folder
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


def _write_and_commit(run: RunObjects, final: Path, options: SaveOptions) -> None:
    comm, is_writer = run.comm, run.writes
    staged = _stage(run, final)
    try:
        with together(comm, f"writing {final}"):
            contents = _write(run, staged, options)
        # Hooks may take models out on rank 0 only.
        (names,) = comm.broadcast_objects([list(contents)])
        with together(comm, f"writing {final}"):
            _check_shards(names, contents)
        for name in names:
            # Its own phase each, as it is collective: every rank or none begins it.
            with together(comm, f"writing {final}"):
                _write_shards(run, staged, name, contents[name])
        with together(comm, f"committing {final}"), _room_for(final):
            run.trackers.flush()  # their runs hold what the checkpoint's ids stand for
            if is_writer:
                directory.seal(staged, _facts(run), options.metadata or {})
                directory.publish(staged, final)
    except BaseException:
        # A sealed directory may be half moved into its place: `directory.repair` finishes that.
        if is_writer and not (staged / directory.MANIFEST).exists():
            directory.discard(staged)
        raise


def _stage(run: RunObjects, final: Path) -> Path:
    """Create the directory that this rank writes in, and see that every rank has one."""
    comm, is_writer = run.comm, run.writes
    mine: Path | None = None
    with together(comm, f"creating {final}"):
        if is_writer:
            directory.tidy(final)
    try:
        with together(comm, f"creating {final}"):
            mine = directory.stage(final) if is_writer else None
        held: dict[str, int | str] = {
            **_numbers(run),
            "custom": ", ".join(run.registered) or "none",
            "state dicts": "sharded" if run.strategy.state.saves_shards else "full",
        }
        ranks = comm.all_gather_object((None if mine is None else fspath(mine), held))
        _check_alike([of_rank for _, of_rank in ranks])
        with together(comm, f"creating {final}"):
            return _own_folder([path for path, _ in ranks], comm.rank, final)
    except CheckpointError:
        if mine is not None:
            directory.discard(mine)
        raise


def _numbers(run: RunObjects) -> dict[str, int]:
    return {kind: len(found) for kind, found in vars(run.objects).items()}


def _check_alike(ranks: list[dict[str, int | str]]) -> None:
    """Refuse, on every rank, ranks that hold other objects: one of them writes for all."""
    differing = [kind for kind in ranks[0] if len({held[kind] for held in ranks}) > 1]
    if differing:
        listed = "; ".join(
            f"rank {rank}: " + ", ".join(f"{kind}: {held[kind]}" for kind in differing)
            for rank, held in enumerate(ranks)
        )
        rule = "one rank writes for all, so every rank has the same objects in the same order"
        remedy = "Prepare and register the same objects in the same order on every rank."
        raise CheckpointError(
            Problem(f"save_state with ranks that differ ({listed})", rule, remedy)
        )


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


def _facts(run: RunObjects) -> dict[str, Any]:
    return {
        "world_size": run.comm.world_size,
        "dp_size": run.plan.parallel_dims.dp_size,
        "draw_leaders": run.plan.parallel_dims.draw_leaders,
        "strategy": run.plan.strategy,
        "mixed_precision": run.plan.mixed_precision,
        "torch": str(torch.__version__),
        "iteration": run.plan.project.iteration,
        "accumulation_step": run.accumulation.step,
        "objects": _numbers(run),
        "registered": run.registered,
        "dataloaders": [describe(loader) for loader in run.objects.dataloaders],
        "trackers": run.trackers.run_ids(),
    }


def _write(run: RunObjects, folder: Path, options: SaveOptions) -> dict[str, Any]:
    """Write all but sharded state; return that by the name of its folder."""
    objects, io = run.objects, run.strategy.state
    read = io.sharded_model_state if io.saves_shards else io.model_state
    weights = [read(model) for model in objects.models]
    # On every rank: full state dicts are gathered from all of them.
    states = list(_shared_states(run))
    shards = _sharded_optimizers(run) if io.saves_shards else {}
    remaining = list(weights)
    rank = run.comm.rank
    with _room_for(folder):
        for hook in options.hooks:
            hook(list(objects.models), remaining, fspath(folder))
        models = hooked(remaining, weights, "save_state")
        if io.saves_shards:
            shards |= _sharded_models(models)
        if run.writes:
            for index, state in () if io.saves_shards else models:
                write_model(state, folder, index, options.safe)
            for name, plain, what in states:
                save_plain(plain, folder / name, what)
        save_plain(rng.capture(), folder / directory.random_states_name(rank), "random states")
        for index, position in enumerate(positions(objects.dataloaders)):
            if position is not None:
                path = folder / directory.positions_name(rank, index)
                save_plain(position, path, f"data loader {index}")
    return shards


def _sharded_models(models: list[tuple[int, dict[str, torch.Tensor]]]) -> dict[str, Any]:
    from accel.checkpoint.sharded import nested_model

    return {
        directory.sharded_model_name(index): nested_model(state, f"model {index}")
        for index, state in models
    }


def _sharded_optimizers(run: RunObjects) -> dict[str, Any]:
    from accel.checkpoint.sharded import nested_optimizer

    names, io = run.parameter_names(), run.strategy.state
    return {
        directory.sharded_optimizer_name(index): nested_optimizer(
            io.sharded_optimizer_state(optimizer, names), f"optimizer {index}"
        )
        for index, optimizer in enumerate(run.objects.optimizers)
    }


def _check_shards(names: list[str], held: Mapping[str, object]) -> None:
    lacking = ", ".join(name for name in names if name not in held)
    if lacking:
        rule = "each rank writes its shards, and rank 0 has models there that this rank has not"
        remedy = "Take the same models out of the list on every rank."
        raise CheckpointError(Problem(f"{lacking} of a pre-hook of save_state", rule, remedy))


def _write_shards(run: RunObjects, folder: Path, name: str, state: dict[str, Any]) -> None:
    from accel.checkpoint import sharded

    with _room_for(folder):
        sharded.write(state, folder / name)


def _room_for(folder: Path) -> contextlib.AbstractContextManager[None]:
    remedy = (
        f"{disk_full.REMEDY} (ProjectConfiguration(project_dir=…)), or keep fewer checkpoints "
        "(ProjectConfiguration(total_limit=…))."
    )
    return disk_full.told("the checkpoint", folder.parent, remedy)


def _shared_states(run: RunObjects) -> Iterator[tuple[str, object, str]]:
    """Yield (file name, state, what it is) of everything but weights and random states."""
    objects = run.objects
    names, io = run.parameter_names(), run.strategy.state
    for index, optimizer in enumerate(() if io.saves_shards else objects.optimizers):
        state = io.optimizer_state(optimizer, names)
        yield numbered("optimizer", ".bin", index), state, f"optimizer {index}"
    for index, scheduler in enumerate(objects.schedulers):
        yield numbered("scheduler", ".bin", index), scheduler.state_dict(), f"scheduler {index}"
    for index, loader in enumerate(objects.dataloaders):
        yield numbered("sampler", ".bin", index), loader.order_state(), f"data loader {index}"
    for index, model in enumerate(objects.models):
        scales = run.strategy.precision.scales(io.unwrap(model))
        if scales:
            yield directory.scales_name(index), scales, f"scales of model {index} in fp8"
    if run.accumulation.scaler is not None:
        yield directory.SCALER, run.accumulation.scaler.state_dict(), "gradient scaler"
    for index, custom in enumerate(objects.custom):
        what = f"registered object {index} ({type(custom).__name__})"
        yield directory.custom_name(index), custom.state_dict(), what
