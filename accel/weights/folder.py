"""Weights on disk that a model reads while it runs: the folder, its index, and lazy mappings.

A folder holds ``index.json`` and a file of raw bytes for each weight; an entry of the index may
instead name a tensor of a safetensors file. Source: the files that the public package writes.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from accel.checkpoint import disk_full
from accel.machine.errors import CheckpointError, ConfigError, Problem, StateError, text_of
from accel.weights.tensors import as_dtype, name_of

T = TypeVar("T")
PathLike = str | os.PathLike[str]
Info = dict[str, object]
Stamp = tuple[int, int, int] | None  # inode, time of modification in ns, and bytes of a file
INDEX = "index.json"
# Names of the dtypes in the header of a safetensors file.
# Source: https://github.com/huggingface/safetensors#format
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


# -- one weight ----------------------------------------------------------------------------


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: PathLike,
    index: MutableMapping[str, Info] | None = None,
) -> MutableMapping[str, Info] | None:
    """Write one weight into a folder of offloaded weights.

    Args:
        weight: a dense tensor that has data, on any device.
        weight_name: full name of the weight, and of its file.
        offload_folder: the folder, which exists.
        index: gets the weight's entry; None: none is kept.

    Returns:
        The index.

    Raises:
        CheckpointError: for a tensor on the meta device, or a file that cannot be written.
    """
    if weight.is_meta:
        rule = "a weight on the meta device has no data to write"
        raise CheckpointError(
            Problem(f"weight {weight_name!r}", rule, "Load the checkpoint before offloading.")
        )
    content = weight.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    path = Path(offload_folder) / f"{weight_name}.dat"
    with _writing(path):
        if not _holds(path, content):
            _write(path, content)
    if index is not None:
        index[weight_name] = {"dtype": name_of(weight.dtype), "shape": list(weight.shape)}
    return index


def make_folder(folder: PathLike) -> Path:
    """Make a folder of offloaded weights if it is missing; else, or for a file, `CheckpointError`.

    Args:
        folder: with its parents.
    """
    path = Path(folder)
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise a `CheckpointError` that names `path` where it cannot be written."""
    try:
        with disk_full.told(f"{str(path)!r}", path.parent):
            yield
    except OSError as error:
        rule = f"the folder of offloaded weights is one that can be written ({text_of(error)})"
        remedy = "Pass another folder as offload_dir or offload_folder."
        raise CheckpointError(Problem(f"{str(path)!r}", rule, remedy)) from error


def _holds(path: Path, content: torch.Tensor) -> bool:
    """Return whether a file has this content: models that are equal may share it."""
    if not path.is_file() or path.stat().st_size != content.numel():
        return False
    return torch.equal(_mapped(path, 0, torch.uint8, (content.numel(),)), content)


def _write(path: Path, content: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # names of modules may contain slashes
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content.numpy().data)  # numpy's `tofile` does not tell of a full disk
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    os.replace(part, path)  # what another process has mapped stays as it is


def load_offloaded_weight(weight_file: PathLike, weight_info: Mapping[str, object]) -> torch.Tensor:
    """Map the file of one offloaded weight into memory.

    Args:
        weight_file: what `offload_weight` wrote.
        weight_info: its entry of the index: ``dtype`` and ``shape``.

    Returns:
        The weight on the CPU; writing to it leaves the file as it is.
    """
    shape = weight_info["shape"]
    assert isinstance(shape, Collection)
    return _mapped(Path(weight_file), 0, as_dtype(str(weight_info["dtype"])), tuple(shape))


def _mapped(path: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over bytes of a file, which are read when they are used."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    begin = start - start % mmap.ALLOCATIONGRANULARITY
    length = start - begin + count * dtype.itemsize
    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=begin)
    except (OSError, ValueError) as error:
        rule = f"it holds no {count * dtype.itemsize} bytes from {start} on ({error})"
        remedy = "Offload the weights again."
        raise CheckpointError(Problem(f"file {str(path)!r}", rule, remedy)) from error
    offset = start - begin
    if start % dtype.itemsize:  # an address that the dtype cannot be read from
        moved = bytearray(memory[offset:])
        return torch.frombuffer(moved, dtype=dtype, count=count).reshape(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(shape)


# -- safetensors, mapped by tensor ---------------------------------------------------------


def _stamp(path: Path) -> Stamp:
    """Return what tells a file from one that is written in its place; None: there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=64)
def _header(path: Path, stamp: Stamp) -> tuple[int, Mapping[str, Mapping[str, object]]]:
    """Return where the data of a safetensors file begins, and its header by tensor.

    `stamp` is that of the file: a file that was written again is read again.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def load_mapped(path: PathLike, name: str, stamp: Stamp = None) -> torch.Tensor:
    """Map one tensor of a safetensors file into memory: other tensors take no address space.

    `stamp` is that of the file, where it is known. Raise `CheckpointError` if the file or the
    tensor is missing.
    """
    path = Path(path)
    try:
        data, header = _header(path, stamp or _stamp(path))
        entry = header[name]
    except (OSError, ValueError, KeyError) as error:
        value = f"weight {name!r} of {str(path)!r}"
        rule = f"an offloaded weight is read from its file ({type(error).__name__}: {error})"
        raise CheckpointError(Problem(value, rule, "Offload or load the model again.")) from error
    offsets, shape = entry["data_offsets"], entry["shape"]
    assert isinstance(offsets, list)
    assert isinstance(shape, list)
    return _mapped(path, data + offsets[0], _DTYPES[str(entry["dtype"])], tuple(shape))


# -- the folder ----------------------------------------------------------------------------


def save_offload_index(index: Mapping[str, Info], offload_folder: PathLike) -> None:
    """Add entries to the index of a folder of offloaded weights.

    Args:
        index: entry by name of a weight; empty: the index stays as it is.
        offload_folder: the folder, which exists.
    """
    if index:
        path = Path(offload_folder) / INDEX
        _write_index(path, {**_read_index(path), **index})


def drop_from_index(names: Collection[str], offload_folder: PathLike) -> None:
    """Remove entries from the index of a folder of offloaded weights, which an earlier model left.

    Args:
        names: of weights; others stay.
        offload_folder: the folder.
    """
    path = Path(offload_folder) / INDEX
    before = _read_index(path)
    if not before.keys().isdisjoint(names):
        _write_index(path, {name: info for name, info in before.items() if name not in names})


def _write_index(path: Path, index: Mapping[str, Info]) -> None:
    part = path.with_name(f"{INDEX}.{os.getpid()}.part")
    with _writing(path):
        part.write_text(json.dumps(index, indent=2), encoding="utf-8")
        os.replace(part, path)


def _read_index(path: Path) -> dict[str, Info]:
    if not path.is_file():
        return {}
    try:
        found: dict[str, Info] = json.loads(path.read_text("utf-8"))
        if not all(isinstance(info, dict) for info in found.values()):
            raise TypeError("an entry is no object")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        rule = f"an index of offloaded weights is a JSON object of objects ({text_of(error)})"
        remedy = "Remove the file, or pass another folder, and offload the weights again."
        raise CheckpointError(Problem(f"file {str(path)!r}", rule, remedy)) from error
    return found


def offload_state_dict(save_dir: PathLike, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write a state dict into a folder, to be read weight by weight.

    Args:
        save_dir: the folder; made if it is missing.
        state_dict: tensors by name.

    Raises:
        CheckpointError: if the folder cannot be written, or has a broken index.
    """
    make_folder(save_dir)
    index: dict[str, Info] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


# -- mappings ------------------------------------------------------------------------------


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name, some in memory, others mapped from disk when they are asked for.

    Another value of a weight is kept in memory; files stay as they are, as others may read them.

    Args:
        state_dict: weights in memory; they take precedence.
        save_folder: a folder that `offload_state_dict` wrote.
        index: entry by name of a weight on disk: ``dtype`` and ``shape`` of a file in
            `save_folder`, or ``safetensors_file`` and ``weight_name``, with a ``dtype`` to convert
            to. None: the index of `save_folder`.
        device: where weights of safetensors files are put; None: the CPU.

    Raises:
        ConfigError: if none of the first three is given.
        CheckpointError: when a weight is read whose file is missing, or was written again since.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: PathLike | None = None,
        index: Mapping[str, Info] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigError.of(
                "OffloadedWeightsLoader()",
                "it needs either a `state_dict`, a `save_folder` or an `index`",
                "Pass what `offload_state_dict` wrote as save_folder.",
            )
        self.state_dict = {} if state_dict is None else state_dict
        # The working directory may be another one when a weight is read.
        self.save_folder = None if save_folder is None else Path(save_folder).absolute()
        if index is None and self.save_folder is not None:
            index = _read_index(self.save_folder / INDEX)
        self.index = {} if index is None else index
        self._began_in = Path().absolute() if self.index else Path()
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device
        self._stamps = {path: _stamp(path) for path in map(self._file, self.index)}
        self._written: dict[str, torch.Tensor] = {}

    def _file(self, key: str) -> Path:
        """Return the file that a weight on disk lies in."""
        found = self.index[key].get("safetensors_file")
        if found is None:
            return (self.save_folder or self._began_in) / f"{key}.dat"
        return self._began_in / str(found)

    def _check_unchanged(self, path: Path) -> Stamp:
        stamp = _stamp(path)
        if stamp != self._stamps.get(path):
            rule = "it was written or removed since the model was dispatched, which reads it"
            remedy = "Load and dispatch the model again, and write other weights elsewhere."
            raise CheckpointError(Problem(f"file {str(path)!r}", rule, remedy))
        return stamp

    def __getitem__(self, key: str) -> torch.Tensor:
        for in_memory in (self._written, self.state_dict):
            if key in in_memory:
                return in_memory[key]
        info, path = self.index[key], self._file(key)
        stamp = self._check_unchanged(path)
        if info.get("safetensors_file") is None:
            return load_offloaded_weight(path, info)
        tensor = load_mapped(path, str(info.get("weight_name", key)), stamp)
        dtype = as_dtype(str(info["dtype"])) if "dtype" in info else None
        return tensor.to(device=self.device, dtype=dtype)

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        if key not in self:
            raise KeyError(key)
        self._written[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def in_memory(self, key: str) -> bool:
        """Return whether a weight is not read from a file.

        Args:
            key: name of the weight.
        """
        return key in self._written or key in self.state_dict

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


class PrefixedDataset(Mapping[str, T]):
    """The entries of a mapping whose keys begin with a prefix, by the rest of their key.

    Args:
        dataset: values by full name.
        prefix: what the names begin with, such as "layers.0.".
    """

    def __init__(self, dataset: Mapping[str, T], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> T:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        begins = (key for key in self.dataset if key.startswith(self.prefix))
        return (key.removeprefix(self.prefix) for key in begins)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def extract_submodules_state_dict(
    state_dict: Mapping[str, T], submodule_names: Collection[str]
) -> dict[str, T]:
    """Return the entries of a state dict that belong to some submodules.

    Args:
        state_dict: values by full name.
        submodule_names: full names of submodules or weights.
    """
    return {
        name: value
        for name, value in state_dict.items()
        if any(name == one or name.startswith(f"{one}.") for one in submodule_names)
    }


class DiskWeights:
    """The folder of offloaded weights that a checkpoint is loaded into.

    A weight in a safetensors file that has the dtype it is wanted in stays there: the index names
    the file. Others are written into the folder.

    Args:
        folder: made if it is missing.
        stored: safetensors file and name in it, by name of a weight.
    """

    def __init__(
        self, folder: str | os.PathLike[str], stored: Mapping[str, tuple[Path, str]]
    ) -> None:
        self.folder = make_folder(folder)
        self.stored = stored
        self.index: dict[str, Info] = {}

    def add(self, name: str, value: torch.Tensor, dtype: torch.dtype, stored_as: str) -> None:
        """Add a weight that was read from the checkpoint, in the dtype that it is wanted in.

        `stored_as`: its name in the checkpoint, which has one of several for a tied weight.
        """
        if stored_as in self.stored and value.dtype == dtype:
            path, key = self.stored[stored_as]
            self.index[name] = {
                "safetensors_file": str(path.resolve()),
                "weight_name": key,
                "dtype": name_of(dtype),
                "shape": list(value.shape),
            }
        else:
            offload_weight(value.to(dtype), name, self.folder, self.index)

    def save(self, wanted: Iterable[str]) -> None:
        """Write the index; of the names `wanted` on disk it has only those of this checkpoint."""
        drop_from_index(set(wanted) - self.index.keys(), self.folder)
        save_offload_index(self.index, self.folder)


Weights = Mapping[str, torch.Tensor]


def in_memory(weights: Weights | None, name: str) -> bool:
    """Return whether an offloaded weight lies in memory, not in a file."""
    if isinstance(weights, PrefixedDataset):
        return in_memory(weights.dataset, f"{weights.prefix}{name}")
    if isinstance(weights, OffloadedWeightsLoader):
        return weights.in_memory(name)
    return isinstance(weights, dict)


def write_weight(weights: Weights | None, name: str, value: torch.Tensor, tied: bool) -> None:
    """Have a weights map give another value of a weight, which is kept in memory.

    Files of weights stay as they are. A value of the same shape and dtype is copied to where the
    present one lies in memory.

    Args:
        weights: gets the value.
        name: of the weight.
        value: on any device.
        tied: whether the mapping has the weight under other names, too.

    Raises:
        StateError: if the mapping cannot be written to, or would have two values of one weight.
    """
    if tied:
        raise StateError(
            f"offloaded weight {name!r} is tied to others and was changed: it is kept by each of "
            "its names, which would differ. Keep its module on a device, or change it before "
            "dispatch_model."
        )
    # A tensor that is made in inference mode cannot be used for gradients later.
    with torch.inference_mode(False), torch.no_grad():
        content = value.detach().to("cpu")
        if in_memory(weights, name):
            assert weights is not None
            present = weights[name]
            fits = present.dtype == content.dtype and present.shape == content.shape
            if fits and not present.is_inference():
                present.copy_(content)
                return
        _set(weights, name, content.clone() if content.data_ptr() == value.data_ptr() else content)


def _set(weights: Any, name: str, value: torch.Tensor) -> None:
    if isinstance(weights, PrefixedDataset):
        _set(weights.dataset, f"{weights.prefix}{name}", value)
    elif isinstance(weights, (dict, OffloadedWeightsLoader)):
        weights[name] = value
    else:
        raise StateError(
            f"offloaded weight {name!r} was changed, and {type(weights).__name__}, which it is "
            "read from, keeps no other value. Pass a dict or an OffloadedWeightsLoader as "
            "weights_map, or offload_buffers=False."
        )
