"""Portable contents: weights by name in safetensors, everything else as plain containers.

Nothing read here can run code: weights are safetensors, the rest is read with
``torch.load(weights_only=True)``. What that could not read back is refused when it is written.
NumPy arrays are pickled, and built from plain entries alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import stat
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from accel.checkpoint import directory
from accel.machine.errors import CheckpointError, Problem


@contextlib.contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Give the file that is put at `path` in the context the mode of a newly made one (umask)."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


T = TypeVar("T")
_EXTRA = "model_extra"
# What the pickle of a NumPy array or scalar calls, under the names of NumPy 1 and 2.
_REBUILD: tuple[Any, ...] = (np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0])
_ARRAYS: list[Any] = [
    np.ndarray,
    np.dtype,
    bytes,  # called for those of an empty array
    *(
        (function, f"numpy.{core}.multiarray.{function.__name__}")
        for function in _REBUILD
        for core in ("core", "_core")
    ),
    *{kind for name, kind in vars(np.dtypes).items() if name.endswith("DType")},
]
_WRITE_ERRORS = (pickle.PickleError, AttributeError, TypeError, ValueError, RuntimeError)


# -- plain values --------------------------------------------------------------------------


def save_plain(value: object, path: Path, what: str) -> None:
    """Write plain containers of tensors, arrays and numbers, and see that they can be read back.

    Raise a `CheckpointError` that names `what` (e.g. "scheduler 0") and the place of a value that
    `load_plain` could not read.
    """
    try:
        torch.save(value, path)
        # With mmap only the structure is read: the tensors' bytes are not touched.
        load(path, map_location="cpu", mmap=True)
    except _WRITE_ERRORS:
        refuse_unreadable(value, what)
        raise


def refuse_unreadable(value: object, what: str) -> None:
    """Raise a `CheckpointError` that names `what` and the place of a value `load` cannot read."""
    found = next(_unreadable(value, what), None)
    if found is not None:
        place, part = found
        kind = type(part)
        raise CheckpointError(
            Problem(
                f"{place} is a {kind.__module__}.{kind.__qualname__}",
                "a checkpoint holds what can be read back without running code: tensors, NumPy "
                "arrays, numbers, strings, and lists, tuples, sets and dicts of them",
                "Leave it out of the state_dict(), or turn it into one of these there (an array of "
                "objects: a list; an enum or a path: str).",
            )
        )


def load_plain(path: Path, map_location: str = "cpu", mmap: bool = False) -> Any:
    """Return what `save_plain` wrote.

    Args:
        map_location: where tensors are; "meta" reads none of their bytes.
        mmap: whether the file is mapped into memory, so that tensors are read when they are used.

    Raises:
        CheckpointError: if the file is missing, would run code, or cannot be mapped.
    """
    try:
        return load(path, map_location, mmap=mmap)
    except FileNotFoundError as error:
        raise _lacking(path) from error
    except (pickle.PickleError, EOFError, RuntimeError, ValueError, KeyError) as error:
        rule = f"it is no file of plain containers and tensors ({_first_line(error)})"
        remedy = (
            "Nothing else is unpickled, as it could run code. Use a checkpoint of `save_state`, or "
            "let classes in that you trust with torch.serialization.add_safe_globals([…])."
        )
        raise CheckpointError(Problem(f"file {str(path)!r}", rule, remedy)) from error


def load(f: str | os.PathLike[str] | BinaryIO, map_location: Any = None, **kwargs: Any) -> Any:
    """Load what `torch.save` wrote, without running code: tensors, plain values, NumPy arrays.

    Args:
        f: path or open file.
        map_location: device of the tensors, as of `torch.load`; None: where they were.
        kwargs: of `torch.load`; ``weights_only=False`` unpickles everything, which can run code.

    Raises:
        pickle.UnpicklingError: if the file holds anything else.
    """
    with torch.serialization.safe_globals(_ARRAYS):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def _lacking(path: Path) -> CheckpointError:
    remedy = (
        "Prepare and register the same objects as when it was saved, or use another checkpoint."
    )
    return directory.broken(path.parent, f"it holds no {path.name}", remedy)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _unreadable(value: Any, place: str) -> Iterator[tuple[str, object]]:
    """Yield (place, value) of each part that does not survive writing and reading."""
    if isinstance(value, Mapping) and type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():
            yield from _unreadable(key, f"{place}: the key {key!r}")
            yield from _unreadable(item, f"{place}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for index, item in enumerate(value):
            yield from _unreadable(item, f"{place}[{index}]")
    elif not _survives(value):
        yield place, value


def _survives(value: object) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        load(buffer, map_location="cpu")
    except _WRITE_ERRORS:
        return False
    return True


# -- tensors by name -----------------------------------------------------------------------


def split_shared(
    state: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors to store, and for each other name the stored one that it is the same as.

    Tensors that only overlap are copied, so that each is stored in full.
    """
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in state.items():
        owner = first.setdefault(_view_of(tensor) or name, name)
        if owner == name:
            kept[name] = tensor.detach().contiguous()
        else:
            aliases[name] = owner
    storages = Counter(_storage_of(tensor) for tensor in kept.values() if tensor.numel())
    return {
        name: tensor.clone() if storages[_storage_of(tensor)] > 1 else tensor
        for name, tensor in kept.items()
    }, aliases


def _storage_of(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _view_of(tensor: torch.Tensor) -> tuple[object, ...] | None:
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return None
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return _storage_of(tensor) + place


def write_tensors(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors by name as safetensors; names of one and the same tensor are stored once.

    Raise `CheckpointError` if the format cannot hold one of them (sparse, meta).

    Source: https://huggingface.co/docs/safetensors/torch_shared_tensors (the metadata that
    `safetensors.torch.save_model` writes: the name left out, and the stored one it stands for).
    """
    refuse_unwritable(state)
    kept, aliases = split_shared(state)
    with usual_mode(path):
        save_file(kept, path, metadata={**aliases, "format": "pt"})


def refuse_unwritable(state: Mapping[str, torch.Tensor]) -> None:
    """Raise `CheckpointError` for a tensor that safetensors cannot hold."""
    for name, tensor in state.items():
        kind = "meta" if tensor.is_meta else str(tensor.layout)
        if kind != str(torch.strided):
            rule = "safetensors holds dense tensors that have data"
            remedy = "Make it dense, or save with safe_serialization=False."
            if tensor.is_meta:
                remedy = "Load its values; those of offloaded weights are saved by "
                remedy += "accelerator.save_model(model, folder)."
            raise CheckpointError(Problem(f"tensor {name!r} ({kind})", rule, remedy))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file on the CPU, by every name they were stored under.

    Raise `CheckpointError` if the file is missing or cut off.
    """
    return read_each(path, lambda file, name: file.get_tensor(name))


def read_each(path: Path, read: Callable[[safe_open, str], T]) -> dict[str, T]:
    """Return `read(file, name)` of each tensor, by every name; errors as of `read_tensors`."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = {name: read(file, name) for name in file.keys()}  # noqa: SIM118 (no dict)
            aliases = dict(file.metadata() or {})
    except FileNotFoundError as error:
        raise _lacking(path) from error
    except (SafetensorError, OSError) as error:
        rule = f"it is no complete safetensors file ({_first_line(error)})"
        value = f"file {str(path)!r}"
        raise CheckpointError(Problem(value, rule, "Use another checkpoint.")) from error
    return found | {name: found[kept] for name, kept in aliases.items() if kept in found}


# -- full models ---------------------------------------------------------------------------


def write_model(
    state: Mapping[str, object], folder: Path, index: int = 0, safe: bool = True
) -> None:
    """Write the state dict of the `index`-th model of a run into `folder`.

    Values other than tensors (`Module.get_extra_state`) must be plain. `safe`: as safetensors.
    """
    if not safe:
        save_plain(dict(state), folder / directory.model_name(index, safe=False), f"model {index}")
        return
    tensors = {name: v for name, v in state.items() if isinstance(v, torch.Tensor)}
    write_tensors(tensors, folder / directory.model_name(index))
    extra = {name: value for name, value in state.items() if name not in tensors}
    if extra:
        save_plain(extra, folder / directory.numbered(_EXTRA, ".bin", index), f"model {index}")


def read_full_model(folder: Path, index: int = 0) -> dict[str, Any]:
    """Return the state dict that `write_model` wrote; files that the manifest lacks do not count.

    Raise `CheckpointError` if there is none.
    """
    manifest = held(folder)
    found = {path.name for path in folder.iterdir()} if manifest is None else manifest
    binary = directory.model_name(index, safe=False)
    if binary in found:
        return dict(load_plain(folder / binary))
    state: dict[str, Any] = read_tensors(folder / directory.model_name(index))
    extra = directory.numbered(_EXTRA, ".bin", index)
    return state | (load_plain(folder / extra) if extra in found else {})


def holds_tensors_alone(folder: Path, index: int = 0) -> bool:
    """Return whether a checkpoint has the `index`-th model in one safetensors file, all of it."""
    listed = held(folder)
    found = {path.name for path in folder.iterdir()} if listed is None else listed
    others = {directory.model_name(index, safe=False), directory.numbered(_EXTRA, ".bin", index)}
    return directory.model_name(index) in found and found.isdisjoint(others)


def held(folder: Path) -> set[str] | None:
    """Return the files that a checkpoint's manifest lists; None without a manifest.

    Others, of the user's own, may lie beside them.
    """
    if not (folder / directory.MANIFEST).exists():
        return None
    return set(directory.read_manifest(folder).files)


def is_held(folder: Path, name: str) -> bool:
    """Return whether a checkpoint holds sharded state in its folder `name`."""
    described = f"{name}/{directory.METADATA}"
    listed = held(folder)
    return (folder / described).is_file() if listed is None else described in listed
