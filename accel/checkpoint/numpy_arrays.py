"""NumPy arrays in plain containers: they lie in a safetensors file beside, none is pickled."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from accel.checkpoint.file_mode import usual_mode
from accel.machine.errors import CheckpointError, Problem

SUFFIX = ".arrays.safetensors"
# What stands in the container for an array: its name in the file, its dtype and its shape.
_MARK = "numpy.ndarray"
# Kinds of dtypes that safetensors holds itself: booleans, integers, floats up to 64 bits.
_NATIVE = "biuf"
_NATIVE_BYTES = 8


def is_storable(value: object) -> TypeGuard[np.ndarray]:
    """Return whether `value` is an array that a file can hold: one of plain, sized entries."""
    return (
        type(value) is np.ndarray
        and not value.dtype.hasobject
        and np.dtype(np.lib.format.dtype_to_descr(value.dtype)) == value.dtype
    )


def take_out(value: object, arrays: dict[str, np.ndarray]) -> object:
    """Return plain containers with marks in place of arrays, and numbers in place of scalars.

    `arrays` receives the arrays by name.
    """
    if isinstance(value, np.generic):
        return value.item()
    if is_storable(value):
        name = str(len(arrays))
        native = value.dtype.kind in _NATIVE and value.dtype.itemsize <= _NATIVE_BYTES
        if native and value.dtype.isnative:
            arrays[name] = np.ascontiguousarray(value)
        else:
            arrays[name] = np.frombuffer(value.tobytes(), dtype=np.uint8)
        described = np.lib.format.dtype_to_descr(value.dtype)
        return {_MARK: name, "dtype": described, "shape": list(value.shape)}
    return _rebuilt(value, lambda item: take_out(item, arrays))


def _rebuilt(value: Any, change: Callable[[object], object]) -> Any:
    """Return a plain container with its keys and entries changed; any other value as it is."""
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({change(key): change(item) for key, item in value.items()})
    if type(value) in (list, tuple, set):
        return type(value)(map(change, value))
    return value


def put_back(value: object, path: Path) -> Any:
    """Return what `take_out` was given, with the arrays of the file that belongs to `path`.

    Raise `CheckpointError` if that file is missing, cut off, or lacks an array.
    """
    return _restored(value, path, {}) if _has_marks(value) else value


def write(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Write arrays beside the file `path`."""
    with usual_mode(file_of(path)):
        save_file(arrays, file_of(path))


def file_of(path: Path) -> Path:
    """Return where the arrays of the file `path` lie."""
    return path.with_name(path.name + SUFFIX)


def _is_mark(value: object) -> TypeGuard[dict[str, Any]]:
    return type(value) is dict and value.keys() == {_MARK, "dtype", "shape"}


def _has_marks(value: Any) -> bool:
    if _is_mark(value):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list, tuple)) and any(map(_has_marks, parts))


def _restored(value: object, path: Path, held: dict[str, np.ndarray]) -> object:
    if _is_mark(value):
        if not held:
            held.update(_read(file_of(path)))
        return _array(value, path, held)
    return _rebuilt(value, lambda item: _restored(item, path, held))


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        rule = f"it is no complete safetensors file ({error})"
        remedy = "Use another checkpoint."
        raise CheckpointError(Problem(f"file {str(path)!r}", rule, remedy)) from error


def _array(mark: dict[str, Any], path: Path, held: dict[str, np.ndarray]) -> np.ndarray:
    found = held.get(mark[_MARK])
    if found is None:
        value = f"file {str(file_of(path))!r}"
        rule = f"it lacks array {mark[_MARK]} of {path.name}"
        raise CheckpointError(Problem(value, rule, "Use another checkpoint."))
    dtype = np.dtype(_as_description(mark["dtype"]))
    if found.dtype == dtype:
        return found.reshape(mark["shape"]).copy()
    return np.frombuffer(found.tobytes(), dtype=dtype).reshape(mark["shape"]).copy()


def _as_description(description: Any) -> Any:
    """Return the description of a dtype, whose fields are tuples."""
    if isinstance(description, list):
        return [tuple(map(_as_description, field)) for field in description]
    return description
