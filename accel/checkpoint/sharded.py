"""Sharded state dicts: folders of `torch.distributed.checkpoint`, one file of shards per rank.

A model's tensors are ``model.<name>``; an optimizer's ``optimizer.state.<name>.<state>`` and
``optimizer.param_groups.<number>.<option>``; further entries of an optimizer are in
``optimizer.accel``. The metadata is a pickle, and so are values other than tensors: only classes
that describe tensors, and plain values, are built from them. No other code runs.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from accel.checkpoint import serialization
from accel.checkpoint.directory import METADATA, broken, is_inside, numbered
from accel.checkpoint.optimizer_state import FORMAT_VERSION
from accel.machine.errors import CheckpointError, Problem

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

    Each rank writes the shards that it holds; all else the lowest rank that has it. What fails on
    one rank raises on all of them.
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
    """Writes what is no shard on one rank: torch would take each value of another one.

    Buffers, such as the statistics of a BatchNorm, may differ, and belong together.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        flat = self.state_dict
        plain = {name for name, value in flat.items() if not is_shard(value)}
        if dist.is_initialized():
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, plain)
            elsewhere = set().union(*ranks[: dist.get_rank()])
            self.state_dict = {k: v for k, v in flat.items() if k not in elsewhere}


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
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.2 pickles members of enums so
            return lambda kind, member: kind[member]
        raise pickle.UnpicklingError(f"{module}.{name} describes no tensor")


class _Reader(FileSystemReader):
    """Reads a directory of torch.distributed.checkpoint, and runs no code of it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA
        remedy = "Name a directory that torch.distributed.checkpoint wrote."
        try:
            with path.open("rb") as file:
                metadata = _Descriptions(file).load()
        except FileNotFoundError:
            rule = f"it has no {METADATA} of sharded weights"
            raise broken(Path(self.path), rule, remedy) from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise broken(path, f"it is no description of tensors ({error})", remedy) from error
        if not isinstance(metadata, Metadata):
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


_MODEL = "model."
_PREFIX = "optimizer.accel.prefix"
# Marks a dict or list that torch writes in one piece, as it does all tuples.
_WHOLE = "accel.whole"
_OTHERS = ("format", "other_state", "unnamed", "extra")


def is_sharded(folder: Path) -> bool:
    """Return whether a folder holds sharded state."""
    return (folder / METADATA).is_file()


def nested_model(state: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return a model's state dict as its folder holds it.

    Raise a `CheckpointError` that names `what` for a value that could not be read back.
    """
    own = {name: _undivided(value, f"{what}[{name!r}]") for name, value in state.items()}
    _check(own, what)
    return {"model": own}


def read_model_folder(folder: Path, allocate: Allocate = empty) -> dict[str, Any]:
    """Return the state dict that lies in a model's folder.

    Args:
        folder: with or without the prefix ``model.`` of all names.
        allocate: is given each name as a place of one entry.

    Raises:
        CheckpointError: if the folder is missing or broken.
    """
    shards = Shards(folder)
    # Alone, a name may begin so, too.
    is_nested = all(place[0] == "model" and len(place) > 1 for place in shards.places.values())
    names = {
        place: name.removeprefix(_MODEL) if is_nested else name
        for name, place in shards.places.items()
    }
    found = shards.read(lambda place, size, dtype: allocate((names[place],), size, dtype))
    return {names[place]: _divided(value) for place, value in found}


def nested_optimizer(saved: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the state of `optimizer_state.state_by_name` as an optimizer's folder holds it.

    Where all parameters are of one model, their names are the model's own, as documented.

    Raise a `CheckpointError` that names `what` for a value that could not be read back.
    """
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    models = {key.partition(":")[0] for key in keys}
    prefix = f"{models.pop()}:" if len(models) == 1 and not saved["unnamed"] else ""
    own = {
        "state": {
            key.removeprefix(prefix): _entries(entry, f"{what}['state'][{key!r}]")
            for key, entry in saved["state"].items()
        },
        "param_groups": [
            {
                **_entries(group, f"{what}['param_groups'][{number}]"),
                "params": [key.removeprefix(prefix) for key in group["params"]],
            }
            for number, group in enumerate(saved["param_groups"])
        ],
        "accel": {"prefix": prefix}
        | {name: _undivided(saved[name], f"{what}[{name!r}]") for name in _OTHERS},
    }
    _check(own, what)
    return {"optimizer": own}


def read_optimizer_folder(folder: Path, index: int, allocate: Allocate = empty) -> dict[str, Any]:
    """Return the state in an optimizer's folder as `optimizer_state.state_by_name` gives it.

    Args:
        folder: with a description of its files.
        index: of the optimizer: where another library wrote the folder, its parameters are those of
            the model of that number.
        allocate: is given (key of a parameter, name of its state) as the place.

    Raises:
        CheckpointError: if the folder is missing or broken.
    """
    shards = Shards(folder)
    is_own = _PREFIX in shards.places
    prefix = shards.value(_PREFIX) if is_own else f"{numbered('model', '', index)}:"

    def allocate_state(place: Place, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if place[:2] != ("optimizer", "state"):
            return empty(place, size, dtype)
        return allocate((f"{prefix}{place[2]}", *place[3:]), size, dtype)

    root: dict[Any, Any] = {}
    for place, value in shards.read(allocate_state):
        node = root
        for key in place[:-1]:
            node = node.setdefault(key, {})
        node[place[-1]] = value
    found = _lists(root).get("optimizer")
    if not isinstance(found, dict) or "param_groups" not in found:
        rule = "it holds no state of an optimizer"
        raise broken(folder, rule, "Name the folder that holds optimizer_0.")
    rest = found.get("accel", {})
    return {
        "format": rest.get("format", FORMAT_VERSION),
        "param_groups": [
            {**group, "params": [f"{prefix}{key}" for key in group["params"]]}
            for group in found["param_groups"]
        ],
        "state": {f"{prefix}{key}": entry for key, entry in found.get("state", {}).items()},
        "other_state": rest.get("other_state", {}),
        "unnamed": rest.get("unnamed", []),
        "extra": rest.get("extra", {}),
    }


def _lists(value: Any) -> Any:
    """Return nested dicts with lists in the place of dicts by position."""
    if not isinstance(value, dict):
        return _divided(value)
    entries = {key: _lists(entry) for key, entry in value.items()}
    if entries and all(isinstance(key, int) for key in entries):
        return [entries[key] for key in sorted(entries)]
    return entries


# -- containers ----------------------------------------------------------------------------


def _entries(value: Any, place: str) -> Any:
    """Return a dict whose entries torch writes one by one, each of them undivided."""
    if not isinstance(value, dict) or not value or not _names(value):
        return _undivided(value, place)
    return {key: _undivided(entry, f"{place}[{key!r}]") for key, entry in value.items()}


def _undivided(value: Any, place: str) -> Any:
    """Return a value so that it is read back as it is.

    torch takes dicts and lists apart: keys become strings, and empty dicts are lost. Those without
    shards are marked, and written in one piece.

    Raise a `CheckpointError` that names `place` for shards that could not be read back.
    """
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if not _holds_shards(value):
        is_kept = isinstance(value, tuple) or (
            isinstance(value, list) and not any(map(_opens, value))
        )
        return value if is_kept else (_WHOLE, value)
    if type(value) is list:
        return [_undivided(entry, f"{place}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, dict) and _names(value):
        return _entries(value, place)
    rule = "shards lie in lists, or in dicts with keys of strings"
    remedy = "Use a list there, or state_dict_type='FULL_STATE_DICT'."
    raise CheckpointError(Problem(f"{place} is a {type(value).__name__}", rule, remedy))


def _divided(value: Any) -> Any:
    """Return what `_undivided` was given, of a value that was written in one piece."""
    is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
    return value[1] if is_pair and value[0] == _WHOLE else value


def _names(value: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)


def _opens(value: Any) -> bool:
    """Return whether torch takes the list apart that a value lies in."""
    return isinstance(value, (Mapping, list, torch.Tensor))


def _holds_shards(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_holds_shards, value.values() if isinstance(value, Mapping) else value))
    return is_shard(value)


def _check(state: Mapping[str, Any], what: str) -> None:
    serialization.refuse_unreadable(_without_tensors(state), what)


def _without_tensors(value: Any) -> Any:
    """Return nested dicts and lists with None in the place of tensors, which all can be written."""
    if isinstance(value, torch.Tensor):
        return None
    value = _divided(value)
    if type(value) in (dict, OrderedDict):
        return {key: _without_tensors(entry) for key, entry in value.items()}
    return list(map(_without_tensors, value)) if type(value) in (list, tuple) else value
