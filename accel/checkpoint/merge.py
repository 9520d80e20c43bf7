"""Sharded weights that `torch.distributed.checkpoint` wrote, merged into one file.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import shutil
from os import PathLike
from pathlib import Path

import torch

from accel.checkpoint import directory, export, full_or_sharded, sharded_state
from accel.checkpoint.sharded import Shards
from accel.weights import weight_files


def merge_weights(
    checkpoint_dir: str | PathLike[str],
    output_path: str | PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge sharded weights into one file: ``model.safetensors`` or ``pytorch_model.bin``.

    Args:
        checkpoint_dir: directory of sharded weights, or one of `Accelerator.save_state`, where they
            may be full; of several models there, the first is merged.
        output_path: folder of the file; made where it is missing.
        safe_serialization: whether the file is safetensors.
        remove_checkpoint_dir: whether the directory is deleted afterwards.

    Raises:
        CheckpointError: if there are no such weights, or they cannot be read.
    """
    source, target = Path(checkpoint_dir), Path(output_path)
    inside = source / directory.sharded_model_name(0)
    # Of a state, files that its manifest lacks do not count: those of an earlier one may be there.
    is_state = full_or_sharded.is_held(source, inside.name)
    places = (source, inside) if is_state else (source,)
    sharded = next(filter(sharded_state.is_sharded, places), None)
    state = _full(source) if sharded is None else _sharded(sharded)
    target.mkdir(parents=True, exist_ok=True)
    name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    export.save_to_path(state, target / name, safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(source)


def _sharded(folder: Path) -> dict[str, torch.Tensor]:
    others = Shards(folder).others()
    if others:
        rule = f"{', '.join(others)} is no tensor, and would be unpickled"
        raise directory.broken(folder, rule, "Name a directory of weights alone.")
    return sharded_state.read_model(folder)


def _full(folder: Path) -> dict[str, torch.Tensor]:
    source = weight_files.find(folder)
    parts = ((name, tensor) for part in source.parts() for name, tensor in part.items())
    return {name: tensor for name, tensor in parts if isinstance(tensor, torch.Tensor)}
