"""Restoring a run: every prepared and registered object, on every rank.

Each phase succeeds on all ranks or raises on all of them before the next begins. A directory in the
documented layout without a manifest was written by another library: it is read without running
code, and nothing tells whether its files are complete.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel.checkpoint import directory
from accel.checkpoint.contents import AnyPath, Hook, RunObjects, hooked, require_path
from accel.checkpoint.directory import (
    Manifest,
    broken,
    numbered,
    sharded_model_name,
    sharded_optimizer_name,
)
from accel.checkpoint.loaders import load_positions, match
from accel.checkpoint.serialization import is_held, load_plain, read_full_model
from accel.comm import rng
from accel.comm.base import decided, together
from accel.logging import get_logger
from accel.machine.errors import StateError

if TYPE_CHECKING:
    from accel.checkpoint.sharded import Allocate


# By kind of object: the names of the file of its `index`-th.
_NAMES: dict[str, Callable[[int], tuple[str, ...]]] = {
    "models": lambda index: (
        directory.model_name(index),
        directory.model_name(index, safe=False),
        f"{directory.sharded_model_name(index)}/{directory.METADATA}",
    ),
    "optimizers": lambda index: (
        numbered("optimizer", ".bin", index),
        f"{directory.sharded_optimizer_name(index)}/{directory.METADATA}",
    ),
    "schedulers": lambda index: (numbered("scheduler", ".bin", index),),
    "custom": lambda index: (directory.custom_name(index),),
}
_ACCELERATOR = re.compile(r"torch_(\w+)_manual_seed")


def is_documented(path: str | PathLike[str]) -> bool:
    """Return whether a directory has the documented files and no manifest."""
    root = Path(path)
    has_manifest = (root / directory.MANIFEST).exists() or any(root.glob(".partial-*"))
    return not has_manifest and (root / directory.random_states_name(0)).is_file()


def describe(path: str | PathLike[str]) -> Manifest:
    """Return the manifest of a directory without one; `CheckpointError` if it lacks the files."""
    root = Path(path)
    if not is_documented(root):
        rule = f"it has no {directory.MANIFEST}, and not the documented files of a state either"
        raise broken(root, rule, "Name a directory that `save_state` wrote to its end.")
    entries = directory.entries(root)
    random_states = load_plain(root / directory.random_states_name(0))
    engine = {
        # Loaders have no files there, however many there were.
        "objects": {kind: _count(entries, kind) for kind in _NAMES} | {"dataloaders": math.inf},
        "world_size": sum(name.startswith("random_states_") for name in entries),
        "mixed_precision": "fp16" if directory.SCALER in entries else "no",
        "accumulation_step": int(random_states.get("step", 0)),
    }
    return Manifest(entries, engine, {})


def _count(present: Mapping[str, object], kind: str) -> int:
    index = 0
    while any(name in present for name in _NAMES[kind](index)):
        index += 1
    return index


def complete(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Add the other names of tied weights, which are stored once, to a state dict."""
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    stored = {id(tensor): state[name] for name, tensor in tensors if name in state}
    tied = {name: stored[id(tensor)] for name, tensor in tensors if id(tensor) in stored}
    return tied | state


def random_states(saved: Any) -> Any:
    """Return random states in the form of `accel.comm.rng.capture`, whichever form they have."""
    if not isinstance(saved, dict) or "random_state" not in saved:
        return saved
    host = rng.as_plain(
        saved["random_state"], saved["numpy_random_seed"], saved["torch_manual_seed"]
    )
    return {**host, "accelerator": _accelerator_state(saved)}


def _accelerator_state(saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of the current device; of several, that of the first that there is."""
    for key, value in saved.items():
        match = _ACCELERATOR.fullmatch(key)
        if match and value is not None and len(value):
            several = isinstance(value, (list, tuple))
            index = _current_device(match[1], len(value)) if several else 0
            return {"kind": match[1], "state": value[index] if several else value}
    return None


def _current_device(kind: str, count: int) -> int:
    module: Any = getattr(torch, kind, None)
    present = module is not None and module.is_available()
    return min(int(module.current_device()), count - 1) if present else 0


def read_model(folder: Path, index: int = 0, allocate: Allocate | None = None) -> dict[str, Any]:
    """Return the state dict of the `index`-th model; files that the manifest lacks do not count.

    Args:
        folder: the checkpoint.
        index: number of the model.
        allocate: returns what a sharded state dict is read into; None: full tensors on the CPU.

    Raises:
        CheckpointError: if there is none, or it is broken.
    """
    name = sharded_model_name(index)
    if not is_held(folder, name):
        return read_full_model(folder, index)
    from accel.checkpoint import sharded

    return sharded.read_model_folder(folder / name, allocate or sharded.empty)


def read_optimizer(folder: Path, index: int = 0, allocate: Allocate | None = None) -> Any:
    """Return the state of the `index`-th optimizer; arguments and errors as of `read_model`."""
    name = sharded_optimizer_name(index)
    if not is_held(folder, name):
        path = folder / numbered("optimizer", ".bin", index)
        return load_plain(path)
    from accel.checkpoint import sharded

    return sharded.read_optimizer_folder(folder / name, index, allocate or sharded.empty)


logger = get_logger(__name__)


@dataclass(frozen=True)
class Saved:
    """A checkpoint to load; a `foreign` one has no manifest of its own."""

    path: Path
    manifest: Manifest
    foreign: bool

    def plain(self, name: str) -> Any:
        """Return what the file `name` holds."""
        return load_plain(self.path / name)


def load(
    run: RunObjects,
    input_dir: AnyPath | None,
    *,
    strict: bool,
    trust_unverified: bool,
    hooks: Iterable[Hook],
) -> Path:
    """Restore the state of `run` and return the directory that it came from.

    The arguments are those of `CheckpointSession.load_state`; `hooks` are called as
    ``hook(models, folder)`` before anything is loaded.

    Raises:
        CheckpointError: on every rank, if it failed on any. Objects may then be partly restored.
        StateError: on every rank, if one has nothing that the state could be loaded into.
    """
    comm, hooks = run.comm, tuple(hooks)
    path = require_path(decided(comm, lambda: _load_path(run, input_dir), "load_state"))
    with together(comm, f"verifying {path}"):
        if run.plan.local_rank == 0:
            directory.repair(path)
            _verify(path, trust_unverified)
    with together(comm, f"loading {path}"):
        saved = _saved(path)
    _check_prepared(run, saved, hooks)
    with together(comm, f"loading {path}"):
        _check_counts(run, saved)
        models = list(run.objects.models)
        for hook in hooks:
            hook(models, fspath(path))
        _restore_models(run, saved, models, strict)
        loaders = _matched(run, saved)
        _restore_objects(run, saved, loaders)
        _restore_positions(run, saved, loaders)
        _restore_random_states(run.plan.parallel_dims.draw_rank, saved)
    _continue_numbering(run, path)
    with together(comm, "continuing the trackers' runs"):
        run.trackers.resume(saved.manifest.engine.get("trackers", {}))
    return path


def _verify(path: Path, trusted: bool) -> None:
    if not is_documented(path):
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
    if is_documented(path):
        return Saved(path, describe(path), foreign=True)
    return Saved(path, directory.read_manifest(path), foreign=False)


def _load_path(run: RunObjects, input_dir: AnyPath | None) -> Path | None:
    if input_dir is not None:
        return Path(input_dir).expanduser().absolute()
    folder = run.folder
    if folder is None:
        return None
    newest = directory.newest_complete(folder.absolute())
    if newest is None:
        raise directory.broken(folder, "no complete checkpoint lies there", "Save one first.")
    return newest


def _check_prepared(run: RunObjects, checkpoint: Saved, hooks: tuple[Hook, ...]) -> None:
    """Refuse to load into nothing; tell what is loaded in part. Hooks may load by themselves."""
    saved = checkpoint.manifest.engine["objects"]
    trained = {kind: saved.get(kind, 0) for kind in ("models", "optimizers", "schedulers")}
    empty = not any(vars(run.objects).values()) and not hooks
    if any(run.comm.all_gather_object(empty)) and any(trained.values()):
        held = ", ".join(f"{kind}: {number}" for kind, number in trained.items() if number)
        raise StateError.of(
            f"load_state({fspath(checkpoint.path)!r}) before prepare (the checkpoint has {held})",
            "a state is loaded into prepared or registered objects, and there are none",
            "Call accelerator.prepare(model, optimizer, …) first, then load_state.",
        )
    held_here = {kind: len(getattr(run.objects, kind)) for kind in (*trained, "custom")}
    partly = [
        f"{number} of {saved[kind]} {'registered objects' if kind == 'custom' else kind}"
        for kind, number in held_here.items()
        if number < saved.get(kind, 0)
    ]
    if partly and not empty:
        logger.warning(
            "The checkpoint %s is loaded in part: %s. Prepare and register the others before "
            "load_state if they are to be loaded, too.",
            checkpoint.path,
            ", ".join(partly),
        )


def _check_counts(run: RunObjects, checkpoint: Saved) -> None:
    """Refuse a checkpoint that lacks what this run trains; what it has besides is not loaded."""
    saved = checkpoint.manifest.engine["objects"]
    lacking = [
        f"{saved.get(kind, 0)} of {len(found)} {kind}"
        for kind, found in vars(run.objects).items()
        if len(found) > saved.get(kind, 0) and kind != "dataloaders"  # a new one starts anew
    ]
    if lacking:
        remedy = "Prepare and register the same objects as when it was saved."
        raise directory.broken(checkpoint.path, f"it holds only {', '.join(lacking)}", remedy)
    # Other names may be those of renamed classes.
    now, then = run.registered, checkpoint.manifest.engine.get("registered", [])
    if now != then and sorted(now) == sorted(then):
        rule = f"objects were registered as {', '.join(then)}, and now as {', '.join(now)}"
        remedy = "Register them in the order in which they were saved."
        raise directory.broken(checkpoint.path, rule, remedy)


def _restore_models(run: RunObjects, saved: Saved, models: list[Any], strict: bool) -> None:
    strategy = run.strategy
    for index, model in hooked(models, run.objects.models, "load_state"):
        state = read_model(saved.path, index, strategy.state.allocate_weights(model))
        if saved.foreign:
            state = complete(strategy.state.unwrap(model), state)
        try:
            strategy.state.load_model_state(model, state, strict=strict)
        except RuntimeError as error:
            rule = f"its weights do not fit model {index} ({type(model).__name__}): {error}"
            remedy = _remedy(str(error))
            raise directory.broken(saved.path, rule, remedy) from error


def _remedy(error: str) -> str:
    """Return the remedy of weights that do not fit; names alone may be given up by strict=False."""
    if "offloaded weights" in error:
        return "Load the checkpoint before the model is offloaded, then prepare the model."
    if "size mismatch" in error:
        return "Build the model as it was when it was saved."
    return "Build the model as it was when it was saved, or pass strict=False."


def _restore_objects(run: RunObjects, saved: Saved, loaders: list[tuple[Any, int]]) -> None:
    objects = run.objects
    names = run.parameter_names()
    for index, optimizer in enumerate(objects.optimizers):
        allocate = run.strategy.state.allocate_state(optimizer, names)
        state = read_optimizer(saved.path, index, allocate)
        if saved.foreign and "format" not in state:  # as torch gives it, and not by name
            optimizer.load_state_dict(state)
        else:
            run.strategy.state.load_optimizer_state(optimizer, state, names)
    for index, model in enumerate(objects.models):
        if directory.scales_name(index) in saved.manifest.files:
            own = run.strategy.state.unwrap(model)
            scales = saved.plain(directory.scales_name(index))
            run.strategy.precision.load_scales(own, scales)
    for index, scheduler in enumerate(objects.schedulers):
        scheduler.load_state_dict(saved.plain(numbered("scheduler", ".bin", index)))
    if not saved.foreign:
        for loader, index in loaders:
            loader.load_order_state(saved.plain(numbered("sampler", ".bin", index)))
    if run.accumulation.scaler is not None:
        _restore_scaler(run.accumulation.scaler, saved)
    for index, custom in enumerate(objects.custom):
        custom.load_state_dict(saved.plain(directory.custom_name(index)))
    run.accumulation.step = int(saved.manifest.engine["accumulation_step"])


def _matched(run: RunObjects, saved: Saved) -> list[tuple[Any, int]]:
    """Return the loaders that were saved, each with the index of its state."""
    engine, loaders = saved.manifest.engine, run.objects.dataloaders
    if saved.foreign:  # whose loaders have no states
        return [(loader, index) for index, loader in enumerate(loaders)]
    indices = match(loaders, engine["dataloaders"])
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


def _restore_positions(run: RunObjects, saved: Saved, loaders: list[tuple[Any, int]]) -> None:
    comm = run.comm
    names = [directory.positions_name(comm.rank, index) for _, index in loaders]
    # Where data is shared out otherwise a rank reads other samples: its old position means nothing.
    here = comm.world_size, run.plan.parallel_dims.dp_size
    same = here == (saved.manifest.engine["world_size"], saved.manifest.dp_size)
    present = [saved.plain(n) if same and n in saved.manifest.files else None for n in names]
    load_positions(comm, [loader for loader, _ in loaders], present)


def _restore_random_states(draw_rank: int, saved: Saved) -> None:
    """Restore the random states that the saved run had on the same rank of draws."""
    present = saved.manifest.files
    name = directory.random_states_name(
        dict(enumerate(saved.manifest.draw_leaders)).get(draw_rank, -1)
    )
    if name in present:
        rng.restore(random_states(saved.plain(name)))
        return
    # There were fewer: a stream of its own, the same at each load.
    root = present[min(n for n in present if n.startswith("random_states_"))].sha256
    rng.set_seed(int(hashlib.sha256(f"{root}:{draw_rank}".encode()).hexdigest()[:8], 16))


def _continue_numbering(run: RunObjects, path: Path) -> None:
    """Give the next checkpoint a number above the loaded one's and above any that exists."""
    project, folder = run.plan.project, run.folder
    if folder is None:
        return

    def taken() -> list[int]:
        present = [directory.iteration_of(p) for p in [path, *directory.checkpoints(folder)]]
        return [number for number in present if number is not None]

    (numbers,) = run.comm.broadcast_objects([taken()])
    project.iteration = max([project.iteration, *(number + 1 for number in numbers)])
