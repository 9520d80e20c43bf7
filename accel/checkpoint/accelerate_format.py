"""Directories in the documented layout without a manifest: another library wrote them.

Their files have the documented names and hold what `torch.save` was given: optimizer states by
position, random states as Python and NumPy give them. They are read without running code; nothing
tells whether all of them are there and whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from accel.checkpoint import directory
from accel.checkpoint.directory import Manifest, broken, numbered
from accel.checkpoint.serialization import load_plain
from accel.comm import rng

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
    random_states = load_plain(root / directory.random_states_name(0), pickled_arrays=True)
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
    """Return a state dict with the names of tied weights that were stored only once."""
    from accel.weights.load_weights import ties

    stored = dict(state)
    for group in ties(model):
        kept = next((name for name in group if name in state), None)
        if kept is not None:
            stored |= {name: state[kept] for name in group if name not in state}
    return stored


def is_by_position(state: object) -> bool:
    """Return whether an optimizer's state is as torch gives it, and not by name as ours."""
    return isinstance(state, dict) and "param_groups" in state and "format" not in state


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
