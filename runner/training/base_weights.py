"""The files that hold the weights which a model's checkpoints leave out.

Such a model, one with adapters on a pretrained base, has the folder as its `base_weights`. A
checkpoint names it, and the SHA-256 of its files and of its configuration; it is loaded onto no
other base.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.checkpoint import directory as checkpoints
from accel.comm.base import together
from accel.machine.errors import ConfigError
from runner.runs.json_files import digest, read_json

if TYPE_CHECKING:
    import torch

    from accel import Accelerator

REMEDY = "Give model.path the base as it was, or train the adapters again."
KEY = "base"  # of a checkpoint's metadata
FORMATS = ("*.safetensors", "*.bin")  # in the order in which libraries look for them
CONFIG = "config.json"
OF_WRITING = ("transformers_version", "_name_or_path")  # fields that do not change the model


def named(models: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Return path and digests of the base of each model, by its name, as far as it has one.

    Args:
        models: that are not prepared yet.

    Returns:
        For each `path`, `sha256` by file name, and the digest of the `config`.
    """
    folders = {name: getattr(model, "base_weights", None) for name, model in models.items()}
    return {
        name: {"path": str(folder), "sha256": digests(folder), "config": _config(folder)}
        for name, folder in folders.items()
        if folder is not None
    }


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each weight file in a folder, by name.

    Args:
        folder: of a pretrained model.
    """
    found = next((files for kind in FORMATS if (files := sorted(folder.glob(kind)))), [])
    states = ((file, file.stat()) for file in found)
    return {file.name: _sha256(file, one.st_size, one.st_mtime_ns) for file, one in states}


def _config(folder: Path) -> str:
    """Return the digest of the configuration's content, however it is written."""
    found = read_json(folder / CONFIG)
    return digest({name: found[name] for name in found if name not in OF_WRITING})


@functools.cache
def _sha256(file: Path, size: int, modified: int) -> str:
    """Return the digest of a file in this state; gigabytes are read once."""
    return checkpoints.file_digest(file)


def require_same(models: Mapping[str, torch.nn.Module], checkpoint: str | Path) -> None:
    """Refuse a checkpoint whose base had other weights, or another configuration.

    Args:
        models: that are not prepared yet.
        checkpoint: that is to be loaded.

    Raises:
        CheckpointError: naming the base of both.
    """
    then, now = checkpoints.read_manifest(checkpoint).metadata.get(KEY) or {}, named(models)
    for name in sorted({*then, *now}):
        saved, found = then.get(name) or {}, now.get(name) or {}
        if saved.get("sha256") != found.get("sha256"):
            place, other = (one.get("path", "no base") for one in (saved, found))
            rule = f"the adapters of {name!r} were trained on the weights of {place}, and those of "
            rule += f"{other} differ"
            raise checkpoints.broken(checkpoint, rule, REMEDY)
        if "config" in saved and saved["config"] != found["config"]:  # older ones lack it
            rule = f"the adapters of {name!r} were trained with another {CONFIG} than that in "
            raise checkpoints.broken(checkpoint, rule + found["path"], REMEDY)


def begin(
    accelerator: Accelerator, models: Mapping[str, torch.nn.Module], resume_from: str | None
) -> dict[str, Any]:
    """Return what a run's checkpoints say of the base; refuse a resume on another one.

    The first process of each machine reads it; all processes call this.

    Args:
        accelerator: of the run.
        models: that are not prepared yet.
        resume_from: the checkpoint to go on from; None: none.

    Raises:
        CheckpointError: if the base has changed since the checkpoint.
        ConfigError: if layers are divided over processes that have to be whole (`kept_whole`).
    """
    for what in (getattr(model, "kept_whole", None) for model in models.values()):
        if what is not None and accelerator.parallel_dims.model_size > 1:
            value, rule = f"{what} of a model that is divided", "each process has whole layers"
            raise ConfigError.of(value, rule, "Shard parameters in place of dividing layers.")
    with together(accelerator.comm, "reading the weights that checkpoints leave out"):
        if not accelerator.is_local_main_process:
            return {}
        if resume_from is not None:
            require_same(models, resume_from)
        return named(models)
