"""Single files and full models for use elsewhere: no manifest, each file replaced atomically."""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from safetensors.torch import save as to_safetensors

from accel.checkpoint import directory
from accel.checkpoint.serialization import refuse_unwritable, split_shared, write_tensors
from accel.machine.errors import CheckpointError, ConfigError, Problem
from accel.machine.tree import iterate
from accel.state import PartialState

UNITS = {
    "": 1,
    **{"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}


# -- single objects ------------------------------------------------------------------------


def save(
    obj: object,
    f: str | os.PathLike[str] | BinaryIO,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Save an object once per run, in the place of `torch.save`.

    Processes do not wait for each other: call `wait_for_everyone` before another one reads it.

    Args:
        obj: what `torch.save` takes; with `safe_serialization`, tensors by name.
        f: path (replaced atomically; "~" is the home folder) or open file.
        save_on_each_node: whether one process of each node saves, for disks that are not shared;
            else only the main process.
        safe_serialization: whether to write safetensors, else what `torch.save` writes.

    Raises:
        CheckpointError: if safetensors cannot hold it.
        StateError: for offloaded weights, which have no values outside their model.
    """
    for tensor in iterate(obj):  # an offloaded weight, which pickle would write without its values
        refuse = getattr(type(tensor), "refuse_saving", None)
        if refuse is not None:
            refuse(tensor)
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if safe_serialization:
        _warn_of_shared(obj)
    if hasattr(f, "write"):
        save_to_file(obj, cast(BinaryIO, f), safe_serialization)
    else:
        save_to_path(obj, Path(f).expanduser(), safe_serialization)


def _warn_of_shared(tensors: Any) -> None:
    """Warn of names whose tensor is stored under another one."""
    refuse_unwritable(tensors)
    dropped = list(split_shared(tensors)[1])
    if dropped:
        warnings.warn(
            f"Removed shared tensor {dropped} while saving: its values are stored once, and the "
            "file's metadata names where. This should be OK, but check by verifying that you "
            "don't receive any warning while reloading",
            stacklevel=3,
        )


def save_to_path(value: Any, path: Path, safe: bool) -> None:
    """Write any object to a path, which is replaced atomically."""
    with directory.replacing(path) as partial:
        _write(value, partial, safe)


def _write(value: Any, path: Path, safe: bool) -> None:
    if safe:
        write_tensors(value, path)
    else:
        torch.save(value, path)


def save_to_file(value: Any, file: BinaryIO, safe: bool) -> None:
    """Write any object to an open file."""
    if not safe:
        torch.save(value, file)
        return
    refuse_unwritable(value)
    kept, aliases = split_shared(value)
    file.write(to_safetensors(kept, metadata={**aliases, "format": "pt"}))


# -- models --------------------------------------------------------------------------------


def parse_size(size: int | str) -> int:
    """Return the bytes of "10GB" (10^9), "5MiB" (2^20) or a number; else raise `ConfigError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    factor = UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None or float(match[1]) <= 0:
        rule = f"it is a number of bytes, or a number and one of {', '.join(filter(None, UNITS))}"
        raise ConfigError.of(f"max_shard_size={size!r}", rule, 'Give e.g. "5GB".')
    return int(float(match[1]) * factor)


def shard(state: Mapping[str, torch.Tensor], max_bytes: int) -> list[dict[str, torch.Tensor]]:
    """Return `state` in shards of at most `max_bytes`; a larger tensor has a shard of its own."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if parts[-1] and size + tensor.nbytes > max_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts


def export_model(
    state: Mapping[str, object],
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe: bool = True,
) -> None:
    """Write a model for use elsewhere: one file, or shards and the index that names them.

    An earlier export in `folder` stays as it is until all files are written; then its own are
    removed and the new ones take their names, the index last. One that is killed meanwhile is
    refused where it is loaded: weights of two exports are never mixed. The arguments are those of
    `save_model`.

    Source: https://huggingface.co/docs/safetensors (index: metadata.total_size, weight_map).
    """
    limit = parse_size(max_shard_size)
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    tensors, extra = _split(state, safe)
    kept, aliases = split_shared(tensors)
    parts = shard(kept, limit)
    name, index = _names(safe)
    names = _shard_names(name, len(parts))
    with contextlib.ExitStack() as renamed_on_exit:  # in reverse order
        new = {
            target: renamed_on_exit.enter_context(directory.replacing(root / target))
            for target in ([index] if len(names) > 1 else []) + names
        }
        for target, part in zip(names, parts, strict=True):
            # Names of one tensor lie in one file, whose metadata lists them.
            named = part | {alias: part[own] for alias, own in aliases.items() if own in part}
            _write(named | extra if target == names[0] else named, new[target], safe)
        if len(names) > 1:
            where = {n: target for target, part in zip(names, parts, strict=True) for n in part}
            if not safe:  # a pickle holds every name; safetensors hold one of those of tied weights
                where |= {alias: where[own] for alias, own in aliases.items()}
            total = sum(tensor.nbytes for tensor in kept.values())
            content = {"metadata": {"total_size": total}, "weight_map": where}
            new[index].write_text(f"{json.dumps(content, indent=2)}\n")
        for written in new.values():
            directory.flush_file(written)
        _remove_former(root, name, index, {*names})


def _split(
    state: Mapping[str, object], safe: bool
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    tensors = {name: v for name, v in state.items() if isinstance(v, torch.Tensor)}
    extra = {name: value for name, value in state.items() if name not in tensors}
    if safe and extra:
        rule = "safetensors holds tensors only"
        remedy = "Save with safe_serialization=False."
        raise CheckpointError(Problem(f"state {', '.join(sorted(extra))}", rule, remedy))
    return tensors, extra


def _names(safe: bool) -> tuple[str, str]:
    """Return the names of the file of weights and of the index of its shards."""
    if safe:
        return "model.safetensors", "model.safetensors.index.json"
    return "pytorch_model.bin", "pytorch_model.bin.index.json"


def _shard_names(name: str, count: int) -> list[str]:
    if count == 1:
        return [name]
    stem, suffix = os.path.splitext(name)
    return [f"{stem}-{i:05d}-of-{count:05d}{suffix}" for i in range(1, count + 1)]


def _remove_former(root: Path, name: str, index: str, current: set[str]) -> None:
    """Remove the index of an earlier export, and its files that are not about to be replaced."""
    stem, suffix = os.path.splitext(name)
    shards = rf"{stem}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}"
    (root / index).unlink(missing_ok=True)
    for path in root.iterdir():
        if re.fullmatch(shards, path.name) and path.name not in current:
            path.unlink(missing_ok=True)
