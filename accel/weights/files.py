"""Files of weights: find them, read them one after the other, merge shards into one.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from accel.checkpoint import directory, export, serialization, sharded
from accel.checkpoint.serialization import load_plain, read_each, read_tensors
from accel.checkpoint.sharded import Shards
from accel.comm.base import together

if TYPE_CHECKING:
    from accel.comm.base import Communicator


T = TypeVar("T")
# Of each format: what a folder may hold; safetensors first, as it cannot run code.
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"
_REQUEST = 1 << 20  # bytes: Linux cuts a larger request of its disk cache to about so many
# Shape by name; None for a value that is no tensor (`Module.get_extra_state`).
Shapes = dict[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class Source:
    """The files of one checkpoint of weights.

    Args:
        path: what the caller named.
        paths: the files, in the order in which they are read.
        weight_map: file name by weight, as the index has it; None without an index.
        mmap: whether legacy files are mapped into memory, not read at once.
    """

    path: Path
    paths: tuple[Path, ...]
    weight_map: Mapping[str, str] | None = None
    mmap: bool = False

    def shapes(self) -> Shapes:
        """Return the shape of every weight; no weight is read.

        Raise `CheckpointError` if a file is missing, or lacks weights that the index lists.
        """
        held = {path.name: _shapes(path) for path in self.paths}
        lacking = [
            f"{name} (in {file})"
            for name, file in (self.weight_map or {}).items()
            if name not in held[file]
        ]
        if lacking:
            raise directory.broken(
                self.path, f"its shards lack {', '.join(lacking)}", "Save it again."
            )
        return {name: shape for shapes in held.values() for name, shape in shapes.items()}

    def stored(self) -> dict[str, tuple[Path, str]]:
        """Return the file, and the name in it, of every weight that lies in safetensors."""
        return {
            name: (path, key)
            for path in self.paths
            if path.suffix == ".safetensors"
            for name, key in read_each(path, lambda _, key: key).items()
        }

    def parts(self) -> Iterator[Mapping[str, object]]:
        """Yield the weights of one file after the other, on the CPU; emptied before the next.

        While one is used, the next is read from the disk into the system's cache.
        """
        with ThreadPoolExecutor(max_workers=1) as reader:
            for first in self.paths[:1]:
                reader.submit(_request, first)
            for path, following in zip_longest(self.paths, self.paths[1:]):
                if following is not None:
                    reader.submit(_request, following)
                is_safe = path.suffix == ".safetensors"
                part = read_tensors(path) if is_safe else dict(load_plain(path, mmap=self.mmap))
                yield part
                part.clear()  # who still holds it does not hold two files in memory


class Broadcast:
    """A source that only rank 0 reads; the others receive each weight, exchanged on `device`.

    `source` is rank 0's; None on other ranks.
    """

    def __init__(self, source: Source | None, comm: Communicator, device: torch.device) -> None:
        self.source = source
        self.comm = comm
        self.device = device

    def stored(self) -> dict[str, tuple[Path, str]]:
        """Return nothing: other ranks may not have the files."""
        return {}

    def shapes(self) -> Shapes:
        """Return the shape of every weight, on each rank."""
        return self._told(lambda: {} if self.source is None else self.source.shapes())

    def parts(self) -> Iterator[Mapping[str, object]]:
        """Yield the weights of one file after the other, on each rank."""
        here = iter(()) if self.source is None else self.source.parts()
        part: Mapping[str, object] | None = None

        def read() -> dict[str, object] | None:
            nonlocal part
            part = next(here, None)
            return None if part is None else {name: _form(value) for name, value in part.items()}

        while (form := self._told(read)) is not None:
            own = part or {}
            yield {name: self._received(own.get(name), value) for name, value in form.items()}

    def _received(self, value: Any, form: object) -> object:
        if not (isinstance(form, tuple) and isinstance(form[1], torch.dtype)):
            return form
        if value is None:
            value = torch.empty(form[0], dtype=form[1])
        return self.comm.broadcast(value.to(self.device).contiguous())

    def _told(self, read: Callable[[], T]) -> T:
        """Return what `read` returns on rank 0; if it fails there, raise on every rank."""
        answer: list[T | None] = [None]
        with together(self.comm, "reading the weights"):
            if self.comm.rank == 0:
                answer = [read()]
        found: T = self.comm.broadcast_objects(answer)[0]
        return found


def _form(value: object) -> object:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _request(path: Path) -> None:
    """Have the system read a file into its cache, where it can be asked to.

    What is wrong with the file is told of by who uses it.
    """
    if hasattr(os, "posix_fadvise") and path.is_file():
        with open(path, "rb") as file:
            for start in range(0, os.fstat(file.fileno()).st_size, _REQUEST):
                os.posix_fadvise(file.fileno(), start, _REQUEST, os.POSIX_FADV_WILLNEED)


# -- which files ---------------------------------------------------------------------------


def find(checkpoint: str | PathLike[str], mmap: bool = False) -> Source:
    """Return the files of `checkpoint`.

    Args:
        checkpoint: a file of weights, an index of shards (``….index.json``), or a folder that holds
            one of these. Where a folder holds both formats, safetensors are taken.

    Raises:
        CheckpointError: if there is none, or more than one of a format.
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return _in_folder(path, mmap)
    if not path.is_file():
        raise directory.broken(path, "there is no such file or folder", "Name one that exists.")
    if path.suffix == ".json":
        return _indexed(path, mmap)
    return Source(path, (path,), mmap=mmap)


def _in_folder(folder: Path, mmap: bool) -> Source:
    for name in _SINGLE:
        indexes = {path for path in folder.glob(f"*{_INDEX}") if _of_format(path, name)}
        found = sorted(indexes | {p for p in (folder / name,) if p.is_file()})
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise directory.broken(folder, f"it holds {names}", "Name the one that is meant.")
        if found:
            return find(found[0], mmap)
    rule = f"it holds no {' or '.join(_SINGLE)}, and no index of shards (*{_INDEX})"
    raise directory.broken(folder, rule, "Name the file of weights itself.")


def _of_format(index: Path, name: str) -> bool:
    """Return whether an index belongs to the format of `name`; others count as legacy."""
    is_safe = index.name.endswith(f".safetensors{_INDEX}")
    return is_safe == name.endswith(".safetensors")


def _indexed(index: Path, mmap: bool) -> Source:
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        rule = f"it is no index of shards ({error!r})"
        raise directory.broken(
            index, rule, 'It is JSON: {"weight_map": {weight: file}}.'
        ) from error
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if not directory.is_inside(name)]
    if outside:
        raise directory.broken(
            index, f"it names {outside}, which lie elsewhere", "Use another one."
        )
    paths = tuple(index.parent / name for name in names)
    missing = ", ".join(path.name for path in paths if not path.is_file())
    if missing:
        raise directory.broken(index, f"its folder lacks {missing}", "Fetch the missing files.")
    return Source(index, paths, weight_map, mmap)


# -- what they hold ------------------------------------------------------------------------


def _shapes(path: Path) -> Shapes:
    if path.suffix != ".safetensors":
        state = load_plain(path, map_location="meta")
        if not isinstance(state, Mapping):
            rule = f"it holds a {type(state).__name__}, not weights by name"
            raise directory.broken(path, rule, "Save the model's state_dict().")
        return {
            name: tuple(value.shape) if isinstance(value, torch.Tensor) else None
            for name, value in state.items()
        }
    return dict(read_each(path, lambda file, name: tuple(file.get_slice(name).get_shape())))


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
    is_state = serialization.is_held(source, inside.name)
    places = (source, inside) if is_state else (source,)
    found = next(filter(sharded.is_sharded, places), None)
    state = _full(source) if found is None else _sharded(found)
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
    return sharded.read_model_folder(folder)


def _full(folder: Path) -> dict[str, torch.Tensor]:
    source = find(folder)
    parts = ((name, tensor) for part in source.parts() for name, tensor in part.items())
    return {name: tensor for name, tensor in parts if isinstance(tensor, torch.Tensor)}
