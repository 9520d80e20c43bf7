"""Checks of the values that the user's methods return to a step or an evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch

from accel.machine.errors import ConfigError, Problem


def shown(value: object) -> str:
    """Return a short description of a value: "None", "a list", "the class Linear"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _refused(owner: object, method: str, value: str, rule: str, remedy: str) -> ConfigError:
    name = f"{type(owner).__name__}.{method}"
    return ConfigError(Problem(f"{name} returned {value}", rule, remedy))


def losses(objective: object, value: object) -> torch.Tensor:
    """Return the losses of an objective, each of one sample: [B].

    Raises:
        ConfigError: if they are no tensor [B], or carry no gradient where there is to be one.
    """
    if not isinstance(value, torch.Tensor):
        rule = "a tensor with the loss of each sample is required, [B]"
        raise _refused(objective, "losses", shown(value), rule, 'Use reduction="none".')
    if value.dim() != 1:
        raise _refused(
            objective,
            "losses",
            f"shape {list(value.shape)}",
            "it returns one value per sample, [B], so that padded samples can be dropped",
            'Use reduction="none" and sum over everything but the first dim.',
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        rule = "a loss must depend on trainable parameters"
        remedy = "Compute it from the model's output, without detach(), item() and no_grad()."
        raise _refused(objective, "losses", "a tensor without gradient", rule, remedy)
    return value


def weights(objective: object, value: object) -> torch.Tensor | None:
    """Return the weights of samples, [B], or None for one each; else a ConfigError."""
    if value is None or (isinstance(value, torch.Tensor) and value.dim() == 1):
        return value
    found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
    rule = "a tensor with the weight of each sample is required, [B], or None for one each"
    raise _refused(objective, "weights", found, rule, "Count the items of each sample.")


def tensors(owner: object, method: str, value: object) -> dict[str, torch.Tensor]:
    """Return values by name, each a tensor; else a ConfigError about the method of `owner`."""
    rule = "it returns tensors by name"
    if not isinstance(value, Mapping):
        raise _refused(owner, method, shown(value), rule, 'Return {"loss": …}.')
    for name, found in value.items():
        if not isinstance(found, torch.Tensor):
            shown_value = f"{shown(found)} for {name!r}"
            raise _refused(owner, method, shown_value, rule, "Return a tensor for each name.")
    return dict(value)


def metrics(owner: object, value: object) -> dict[str, float]:
    """Return the result of `summarize` as numbers by name; else raise a ConfigError."""
    rule = "it returns the metrics of the data set, numbers by name"
    remedy = 'Return {"loss": 0.5, …}.'
    if not isinstance(value, Mapping):
        raise _refused(owner, "summarize", shown(value), rule, remedy)
    found: dict[str, float] = {}
    for name, metric in value.items():
        if isinstance(metric, torch.Tensor) and metric.numel() != 1:
            shown_value = f"a tensor of shape {list(metric.shape)} for {name!r}"
            raise _refused(owner, "summarize", shown_value, rule, "Return its mean, or the like.")
        try:
            found[str(name)] = float(metric)
        except (TypeError, ValueError):
            shown_value = f"{shown(metric)} for {name!r}"
            raise _refused(owner, "summarize", shown_value, rule, remedy) from None
    return found


# -- predictions ---------------------------------------------------------------------------


def rows(
    owner: object, value: object, num_samples: int | None, names: Sequence[str] | None = None
) -> list[dict[str, object]]:
    """Return the result of `predict` as one mapping of plain values per sample.

    Each tensor [B, ...] of nested mappings and lists is a column with a dotted name; so is a list
    of B other values, such as texts, or tensors of different lengths. `owner` is the step or
    objective that was called; `num_samples` is B, None: not known; `names` are the columns of the
    batches before, None: there is none.

    Raises:
        ConfigError: if a column has not one row per sample, holds a type that JSON lacks, or is not
            that of the batches before.
    """
    nodes = value if isinstance(value, Mapping) else {"prediction": value}
    columns = dict(_columns(nodes, num_samples))
    size = next(map(_num_rows, columns.values()), None) if num_samples is None else num_samples
    rule = "a prediction has one row for each sample of the batch"
    rule += f", which has {num_samples}" if num_samples is not None else ""
    remedy = "Return a tensor [B, ...], or several by name, of the B samples that are given."
    if not columns:
        raise _refused(owner, "predict", f"{shown(value)} without values", rule, remedy)
    found = {}
    for name, column in columns.items():
        shown_value = _described(column) + (f" for {name!r}" if isinstance(value, Mapping) else "")
        if not size or _num_rows(column) != size:
            raise _refused(owner, "predict", shown_value, rule, remedy)
        found[name] = _json_rows(owner, column, shown_value)
    if names is not None and list(names) != list(found):
        rule = f"the batches before gave {', '.join(names)}"
        remedy = "Return the same names for every batch; give lists of tensors names of their own."
        raise _refused(owner, "predict", f"values for {', '.join(found)}", rule, remedy)
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


def _json_rows(owner: object, column: object, shown_value: str) -> list[object]:
    try:
        return [_plain(row) for row in _listed(column)]
    except TypeError as error:
        rule, remedy = f"JSON has no type for {error}", "Return tensors, numbers or texts."
        raise _refused(owner, "predict", shown_value, rule, remedy) from None


def _columns(nodes: Mapping[Any, object], num_samples: int | None) -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of each column of nested mappings and lists."""
    for name, node in nodes.items():
        inner = node
        if isinstance(node, (list, tuple)) and _lists_columns(node, num_samples):
            inner = dict(enumerate(node))
        if isinstance(inner, Mapping):
            yield from ((f"{name}.{key}", column) for key, column in _columns(inner, num_samples))
        else:
            yield str(name), node


def _lists_columns(values: Sequence[object], num_samples: int | None) -> bool:
    """Return whether a list is one of columns [B, ...], not of one entry per sample."""
    if not values or not all(map(_is_array, values)):
        return False
    size = _num_rows(values[0]) if num_samples is None else num_samples
    return size is not None and all(_num_rows(column) == size for column in values)


class _Array(Protocol):
    """A tensor, or an array of another library."""

    @property
    def shape(self) -> Sequence[int]: ...

    def tolist(self) -> list[object]: ...


def _is_array(value: object) -> TypeGuard[_Array]:
    return hasattr(value, "tolist") and hasattr(value, "shape")


def _num_rows(column: object) -> int | None:
    if _is_array(column):
        return int(column.shape[0]) if len(column.shape) else None
    return len(column) if isinstance(column, (list, tuple)) else None


def _described(column: object) -> str:
    if _is_array(column):
        return f"{shown(column)} of shape {list(column.shape)}"
    if isinstance(column, (list, tuple)):
        return f"{shown(column)} of {len(column)}"
    return shown(column)


def _listed(column: object) -> list[object]:
    """Return the rows of a column; of a value that is none, itself as the only row."""
    if _is_array(column):
        return column.tolist()
    return list(column) if isinstance(column, (list, tuple)) else [column]


def _plain(value: object) -> object:
    """Return a value in types of JSON; raises TypeError, naming a type that JSON lacks."""
    if value is None or isinstance(value, (bool, int, float, str, os.PathLike)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if _is_array(value):
        return _plain(value.tolist())
    raise TypeError(shown(value))
