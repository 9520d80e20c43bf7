"""Sharded state dicts: folders of `torch.distributed.checkpoint`, one file of shards per rank.

The description of a folder is a pickle, and so are its values that are no tensors: only the classes
that describe tensors, and plain values, are built from them, and no other code runs.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from accel.checkpoint import serialization
from accel.checkpoint.directory import METADATA, broken, is_inside

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
ANOTHER = "Use another checkpoint: an older one may be complete."
# Where a value lies in nested dicts and lists.
Place = tuple[str | int, ...]
# Returns the tensor to read into, of a given place, size and dtype; on meta: it is not read.
Allocate = Callable[[Place, torch.Size, torch.dtype], torch.Tensor]


def write(state: Mapping[str, Any], folder: Path) -> None:
    """Write nested dicts of DTensors, tensors and plain values; collective over all ranks.

    Each rank writes the shards that it holds, and rank 0 all else. What fails on one rank raises on
    all of them.
    """
    try:
        with _alone():
            save(dict(state), storage_writer=FileSystemWriter(folder), planner=_Writing())
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        raise failures[0] from error


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Silence what torch says where one process works by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


class Shards:
    """A folder of sharded state, whose description is read at once and whose values are not.

    Raises:
        CheckpointError: if there is none, it is broken, or its files are missing or cut off.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _Reader(folder)
        self._metadata = self._reader.read_metadata()
        self._check_files()
        places: Mapping[str, Place] = self._metadata.planner_data or {}
        self.places: dict[str, Place] = {
            name: tuple(places.get(name, (name,))) for name in self._metadata.state_dict_metadata
        }

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for info in (self._metadata.storage_data or {}).values():
            ends[info.relative_path] = max(
                ends.get(info.relative_path, 0), info.offset + info.length
            )
        wrong = []
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if not is_inside(name):
                wrong.append(f"{name} lies elsewhere")
            elif not path.is_file():
                wrong.append(f"{name} is missing")
            elif path.stat().st_size < end:
                wrong.append(f"{name} has {path.stat().st_size} bytes, not {end}")
        if wrong:
            raise broken(self.folder, "; ".join(wrong), ANOTHER)

    def others(self) -> list[str]:
        """Return the names of values that are no tensors."""
        described = self._metadata.state_dict_metadata
        return [k for k, one in described.items() if not isinstance(one, TensorStorageMetadata)]

    def value(self, name: str) -> Any:
        """Return one value that is no tensor; errors as of `read`."""
        wanted: dict[str, Any] = {name: None}
        self._load(wanted)
        return wanted[name]

    def read(self, allocate: Allocate) -> Iterator[tuple[Place, Any]]:
        """Yield (place, value) of everything, tensors as `allocate` returns them; no collectives.

        Raises:
            CheckpointError: if a file cannot be read, or would run code.
        """
        values: dict[str, Any] = {}
        for name, described in self._metadata.state_dict_metadata.items():
            values[name] = None
            if isinstance(described, TensorStorageMetadata):
                dtype = described.properties.dtype
                values[name] = allocate(self.places[name], described.size, dtype)
        wanted = {
            name: value for name, value in values.items() if not getattr(value, "is_meta", False)
        }
        self._load(wanted)
        for name, value in (values | wanted).items():
            yield self.places[name], value

    def _load(self, wanted: dict[str, Any]) -> None:
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with _alone():  # each rank reads by itself
                load(wanted, storage_reader=self._reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            failure = next(iter(error.failures.values()))[0]
            first = (str(failure).splitlines() or [""])[0]
            rule = f"it cannot be read ({type(failure).__name__}: {first})"
            raise broken(self.folder, rule, ANOTHER) from error


class _Writing(DefaultSavePlanner):
    """Writes what is no shard on rank 0: torch would take each value of another rank.

    Buffers, such as the statistics of a BatchNorm, may differ, and belong together.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if not is_coordinator:
            flat = self.state_dict
            self.state_dict = {k: one for k, one in flat.items() if is_shard(one)}


class _Planner(DefaultLoadPlanner):
    """Reads values that are no tensors without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = serialization.load(value, map_location="cpu")


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


def is_shard(value: object) -> bool:
    """Return whether a value is a DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "to_local")


def empty(place: Place, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a full tensor on the CPU to read into."""
    return torch.empty(size, dtype=dtype)
