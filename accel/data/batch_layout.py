"""Where a batch has one entry per sample: those entries are cut and joined, the rest is not."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any, TypeGuard

import numpy as np
import torch

from accel.machine.errors import ConfigError, Problem
from accel.machine.tree import honor_type, is_namedtuple, like_mapping

# Keys and indices that lead to a part of nested data; () is all of it.
Path = tuple[Any, ...]
Samples = torch.Tensor | np.ndarray | list[object] | tuple[object, ...]


class SampleLayout:
    """Knows which parts of a loader's batches have one entry per sample.

    A tensor or array [B, ...] or a list of B entries is per sample if it has the length B of its
    batch in every batch of a pass. Everything else is not cut, and must be the same in batches that
    are joined. `paths` are the parts with one entry per sample; () before the first batch.

    Args:
        batch_size: samples of a full batch; None: not known.
        collator: name of the function that makes the batches, for messages.
    """

    def __init__(self, batch_size: int | None = None, collator: str = "collate_fn") -> None:
        self.paths: tuple[Path, ...] = ()
        self._batch_size = batch_size
        self._collator = collator
        self._last_size = 0
        self._used = False  # whether batches were joined or cut

    def read(self, batch: object) -> int:
        """Take in the next batch and return its number of samples; `ConfigError` if unknown."""
        if self.paths:
            size = self._known_size(batch)
            self._keep_paths(batch, size)
        else:
            size = self._first_size(batch)
            self.paths = tuple(_sample_paths(batch, size)) if size else ()
        self._last_size = size
        if not self.paths:
            raise self._refused(
                f"a batch of type {type(batch).__name__}",
                "it holds a tensor or a list with one entry per sample",
                f"Return such from {self._collator}, or set dispatch_batches=False.",
            )
        return size

    def size_of(self, batch: object) -> int:
        """Return the number of samples of what `join` or `cut` returned."""
        return next(n for n in (_length_at(batch, path) for path in self.paths) if n is not None)

    def _keep_paths(self, batch: object, size: int) -> None:
        """Keep the paths that have one entry per sample in `batch`, too."""
        kept = tuple(path for path in self.paths if _length_at(batch, path) == size)
        if self._used and kept != self.paths:
            path = next(path for path in self.paths if path not in kept)
            raise self._refused(
                f"a batch of {size} samples and {_length_at(batch, path)} {_named(path)}",
                "batches before had one entry per sample there, and were cut so",
                f"Let {self._collator} return one entry per sample (for a constant: a list of as "
                "many), or set dispatch_batches=False.",
            )
        self.paths = kept

    def _known_size(self, batch: object) -> int:
        lengths = {n for n in (_length_at(batch, path) for path in self.paths) if n is not None}
        if len(lengths) > 1:  # what has kept its length was no list of samples
            lengths -= {self._last_size}
        if len(lengths) == 1:
            return lengths.pop()
        raise self._ambiguous(lengths)

    def _first_size(self, batch: object) -> int:
        expected = self._batch_size
        lengths = list(_lengths(batch))
        if expected is not None and expected in lengths:
            return expected
        if expected is not None and expected in _list_lengths(batch):
            if len(set(lengths)) == 1 and lengths[0] < expected:  # or so many fields of a batch
                raise self._ambiguous({lengths[0], expected})
            return expected
        tensors = [n for n in _lengths(batch, lists=False) if expected is None or n < expected]
        found = tensors[:1] or sorted(set(lengths))
        if len(found) > 1:
            raise self._ambiguous(set(found))
        return found[0] if found else 0

    def _ambiguous(self, lengths: set[int]) -> ConfigError:
        return self._refused(
            f"a batch with lengths {sorted(lengths)}",
            "the number of its samples is the length of its tensors",
            f"Return tensors [samples, ...] from {self._collator}, or set dispatch_batches=False.",
        )

    def _refused(self, what: str, rule: str, remedy: str) -> ConfigError:
        return ConfigError(Problem(f"dispatch_batches=True with {what}", rule, remedy))

    # -- joining -------------------------------------------------------------------------------

    def join(self, batches: Sequence[object]) -> object:
        """Return nested data with the samples of all `batches`, in order.

        Raise `ConfigError` if they cannot be joined, or differ in what has no entry per sample.
        """
        self._used = True
        return batches[0] if len(batches) == 1 else self._joined(batches, ())

    def _joined(self, values: Sequence[Any], path: Path) -> Any:
        first = values[0]
        if path in self.paths:
            if isinstance(first, torch.Tensor):
                self._check_shapes(values, path)
                return torch.cat(list(values))
            if isinstance(first, np.ndarray):
                self._check_shapes(values, path)
                return np.concatenate(values)
            return type(first)(itertools.chain.from_iterable(values))
        parts = _parts(first)
        if parts is None:
            if not all(_same(first, other) for other in values[1:]):
                raise self._different(first, path)
            return first
        keys = [key for key, _ in parts]
        others = [_parts(other) or [] for other in values[1:]]
        if any([key for key, _ in other] != keys for other in others):
            raise self._different(first, path)
        columns = [[value[key] for value in values] for key in keys]
        pairs = zip(keys, columns, strict=True)
        return _rebuilt(first, [self._joined(column, (*path, key)) for key, column in pairs])

    def _check_shapes(self, tensors: Sequence[torch.Tensor | np.ndarray], path: Path) -> None:
        shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
        if len(shapes) > 1:
            found = " and ".join(str([*tensor.shape]) for tensor in tensors[:2])
            raise self._refused(
                f"batches whose {_named(path)} have the shapes {found}",
                "batches that are read together for all processes become one, so samples have one "
                "shape",
                f"Let {self._collator} pad to a fixed length, or set split_batches=True (each "
                "batch is cut; drop_last=True or even_batches=False leave the last as it is) or "
                "dispatch_batches=False.",
            )

    def _different(self, value: object, path: Path) -> ConfigError:
        return self._refused(
            f"batches whose {_named(path)} ({type(value).__name__}) differ",
            "what does not have one entry per sample is the same in batches that are read together",
            f"Let {self._collator} return one entry per sample, or set split_batches=True or "
            "dispatch_batches=False.",
        )

    # -- cutting -------------------------------------------------------------------------------

    def cut(self, batch: object, samples: slice) -> object:
        """Return the chosen samples of nested data."""
        return cut_samples(batch, self.paths, samples)

    def leaves(self, batch: Any, samples: slice) -> dict[Path, Samples]:
        """Return copies of the chosen samples of the parts that have one entry per sample."""
        found = {path: reduce(getitem, path, batch)[samples] for path in self.paths}
        return {p: v.clone() if isinstance(v, torch.Tensor) else v for p, v in found.items()}

    def complete(
        self, batch: object, size: int, first: Mapping[Path, Samples], multiple: int
    ) -> tuple[object, int]:
        """Return a batch of `size` samples completed to a multiple of `multiple`, and its new size.

        `first` is what `leaves` returned for the samples to repeat.
        """
        missing = -size % multiple
        if missing == 0:
            return batch, size
        filler = _changed(batch, self.paths, lambda path, _: _repeated(first[path], missing))
        return self.join([batch, filler]), size + missing

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the pass so far."""
        return {"paths": self.paths, "last_size": self._last_size, "used": self._used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.paths = tuple(tuple(path) for path in state["paths"])
        self._last_size, self._used = state["last_size"], state["used"]


def _repeated(samples: Samples, length: int) -> Samples:
    repeats = -(-length // len(samples))
    if isinstance(samples, torch.Tensor):
        return torch.cat([samples] * repeats)[:length]
    if isinstance(samples, np.ndarray):
        return np.concatenate([samples] * repeats)[:length]
    return (samples * repeats)[:length]


def cut_samples(batch: object, paths: Iterable[Path], samples: slice) -> Any:
    """Return nested data with the chosen samples of the parts at `paths`; the rest is not cut."""
    return _changed(batch, set(paths), lambda _, value: value[samples])


def _changed(
    value: object, paths: Container[Path], change: Callable[[Path, Any], object], path: Path = ()
) -> Any:
    """Return nested data with the parts at `paths` as `change` returns them."""
    if path in paths:
        return change(path, value)
    parts = _parts(value)
    if parts is None:
        return value
    return _rebuilt(value, [_changed(part, paths, change, (*path, key)) for key, part in parts])


def batch_length(batch: object, batch_size: int | None = None) -> int:
    """Return the samples of a batch (a full one has `batch_size`); `ConfigError` if not known."""
    return SampleLayout(batch_size).read(batch)


def num_samples(batch: object, batch_size: int | None = None) -> int:
    """Return what `batch_length` does, 0 if the number is not known."""
    try:
        return batch_length(batch, batch_size)
    except ConfigError:
        return 0


# -- nested data -------------------------------------------------------------------------------


def _is_plain(value: object) -> TypeGuard[Sequence[object]]:
    """Return whether `value` lists plain objects (strings, numbers)."""
    return (
        isinstance(value, (list, tuple))
        and not is_namedtuple(value)
        and not any(isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in value)
    )


def _parts(value: object) -> list[tuple[Any, Any]] | None:
    """Return the entries of a container with their keys, None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)) and not _is_plain(value):
        return list(enumerate(value))
    return None


def _rebuilt(value: object, entries: list[object]) -> object:
    if isinstance(value, Mapping):
        return like_mapping(value, dict(zip(value, entries, strict=True)))
    return honor_type(value, entries)


def _lengths(value: object, lists: bool = True) -> Iterator[int]:
    """Yield the lengths of the tensors (arrays and lists of plain objects) in nested data."""
    if isinstance(value, torch.Tensor):
        if value.ndim:
            yield len(value)
    elif isinstance(value, np.ndarray):
        if lists and value.ndim:
            yield len(value)
    elif _is_plain(value):
        if lists and len(value):
            yield len(value)
    else:
        for _, part in _parts(value) or ():
            yield from _lengths(part, lists)


def _list_lengths(value: object) -> Iterator[int]:
    """Yield the lengths of the lists of containers and tensors in nested data."""
    parts = _parts(value) or []
    if parts and not isinstance(value, Mapping) and not is_namedtuple(value):
        yield len(parts)
    for _, part in parts:
        yield from _list_lengths(part)


def _sample_paths(value: object, size: int, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of the parts with `size` entries, one per sample."""
    if isinstance(value, (torch.Tensor, np.ndarray)) or _is_plain(value):
        if getattr(value, "ndim", 1) and len(value) == size:
            yield path
        return
    if isinstance(value, (list, tuple)) and not is_namedtuple(value) and len(value) == size:
        lengths = list(_lengths(value))
        if not lengths or any(length != size for length in lengths):  # no list of batched fields
            yield path
            return
    for key, part in _parts(value) or ():
        yield from _sample_paths(part, size, (*path, key))


def _length_at(value: object, path: Path) -> int | None:
    """Return the length of the part at `path`, None if there is none."""
    for key in path:
        if isinstance(value, Mapping):
            if key not in value:
                return None
        elif not isinstance(value, (list, tuple)) or key >= len(value):
            return None
        value = value[key]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, (list, tuple)):
        same_kind = type(one) is type(other) and len(one) == len(other)
        return same_kind and all(map(_same, one, other))
    return bool(one == other)


def _named(path: Path) -> str:
    return f"entries {'.'.join(map(str, path))!r}" if path else "tensors"


# -- samples in a checkpoint -------------------------------------------------------------------


def is_storable(value: object) -> bool:
    """Return whether a checkpoint can hold samples: tensors, arrays, numbers, text, containers."""
    if isinstance(value, dict):
        return is_storable(list(value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_storable, value))
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    plain = (torch.Tensor, np.generic, bool, int, float, str, bytes)
    return value is None or isinstance(value, plain)


def warn_of_lost_samples() -> None:
    """Warn that a resumed pass pads its last round with other samples than a whole pass would."""
    problem = Problem(
        "a position in a pass whose first samples are not saved",
        "a checkpoint holds tensors, numbers and text only; a short last round is padded with "
        "samples from where reading continues",
        "Let the samples be tensors, or set even_batches=False.",
    )
    warnings.warn(str(problem), stacklevel=3)
