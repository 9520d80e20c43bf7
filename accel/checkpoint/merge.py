"""Sharded weights that `torch.distributed.checkpoint` wrote, merged into one file.

Metadata there is a pickle: only the classes that describe tensors are built from it, and no other
code runs.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from accel.checkpoint import export, weight_files
from accel.checkpoint.directory import broken

METADATA = ".metadata"
# Modules and the names in them that describe tensors; a pickle may name no others.
DESCRIPTIONS: dict[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch": ("Size", "strided", "contiguous_format", "preserve_format", "device"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset"),
    **dict.fromkeys(("pathlib", "pathlib._local"), ("PosixPath", "WindowsPath")),
}


class _Descriptions(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in DESCRIPTIONS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} describes no tensor")


class _Reader(FileSystemReader):
    """Reads a directory of torch.distributed.checkpoint, and runs no code of it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _Descriptions(file).load()
        except FileNotFoundError:
            rule = f"it has no {METADATA} of sharded weights"
            remedy = "Name the directory that holds its .distcp files."
            raise broken(Path(self.path), rule, remedy) from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            remedy = "Name a directory that torch.distributed.checkpoint wrote."
            raise broken(path, f"it is no description of tensors ({error})", remedy) from error
        if not isinstance(metadata, Metadata):
            remedy = "Name a directory that torch.distributed.checkpoint wrote."
            raise broken(path, "it is no description of tensors", remedy)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def merge_weights(
    checkpoint_dir: str | PathLike[str],
    output_path: str | PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge sharded weights into one file: ``model.safetensors`` or ``pytorch_model.bin``.

    Args:
        checkpoint_dir: directory of sharded weights, or one of `Accelerator.save_state`, where they
            are full.
        output_path: folder of the file; made where it is missing.
        safe_serialization: whether the file is safetensors.
        remove_checkpoint_dir: whether the directory is deleted afterwards.

    Raises:
        CheckpointError: if there are no such weights, or they cannot be read.
    """
    source, target = Path(checkpoint_dir), Path(output_path)
    state = _sharded(source) if (source / METADATA).exists() else _full(source)
    target.mkdir(parents=True, exist_ok=True)
    name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    export.save_to_path(state, target / name, safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(source)


def _sharded(folder: Path) -> dict[str, torch.Tensor]:
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    others = [
        name
        for name, described in metadata.state_dict_metadata.items()
        if not isinstance(described, TensorStorageMetadata)
    ]
    if others:
        rule = f"{', '.join(others)} is no tensor, and would be unpickled"
        raise broken(folder, rule, "Name a directory of weights alone.")
    state: dict[str, Any] = {
        name: torch.empty(described.size, dtype=described.properties.dtype)
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # of a process group that is not wanted
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(state, storage_reader=reader, no_dist=True)
    prefix = "model."
    nested = all(name.startswith(prefix) for name in state)
    return {name.removeprefix(prefix) if nested else name: value for name, value in state.items()}


def _full(folder: Path) -> dict[str, torch.Tensor]:
    source = weight_files.find(folder)
    parts = ((name, tensor) for part in source.parts() for name, tensor in part.items())
    return {name: tensor for name, tensor in parts if isinstance(tensor, torch.Tensor)}
