"""Weights without data whose hooks were removed: where their values lie, under which name."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.checkpoint.offload_folder import (
    Info,
    OffloadedWeightsLoader,
    PathLike,
    PrefixedDataset,
    Stamp,
)
from accel.errors import ConfigError, listed
from accel.large.offloaded_tensors import ORIGIN
from accel.large.tensors import held_in, set_module_tensor_to_device
from accel.large.weights_map import Weights


def remember(tensor: torch.Tensor, weights: Weights, name: str) -> None:
    """Note in a tensor without data where its values lie: its module may get another name.

    Args:
        tensor: of a module.
        weights: have its values.
        name: of it there.
    """
    if isinstance(weights, PrefixedDataset):
        remember(tensor, weights.dataset, f"{weights.prefix}{name}")
        return
    source = weights.source(name) if isinstance(weights, OffloadedWeightsLoader) else None
    tensor.__dict__[ORIGIN] = name, source


def forget(tensor: torch.Tensor) -> None:
    """Drop what `remember` noted."""
    tensor.__dict__.pop(ORIGIN, None)


class _Renamed(NamedTuple):
    """A weight whose name is another one than that which it was offloaded by."""

    names: list[str]  # in the model
    was: str
    source: tuple[str, str, Stamp] | None


def load_renamed(
    model: nn.Module,
    folder: PathLike | None,
    index: Mapping[str, Info] | None = None,
    given: Collection[str] = (),
    copy: bool = False,
) -> None:
    """Load left weights that have other names than when they were offloaded, as after a deletion.

    By its present name, each would get the values of another. Those that an index has by the
    present names stay as they are, unless it has the former values by another name, too.

    Args:
        model: without hooks of a dispatch.
        folder: of offloaded weights; None, without an index: nothing is loaded.
        index: where they lie; None: the index of the folder.
        given: names of weights that get other values.
        copy: whether the values are read at once; else they are mapped from their files.

    Raises:
        ConfigError: naming those that do not lie any more where they were offloaded.
    """
    renamed = [one for one in _renamed(model) if not any(name in given for name in one.names)]
    if not renamed or (folder is None and index is None):
        return
    weights = OffloadedWeightsLoader(save_folder=folder, index=index)
    found: dict[str, list[str]] = {}
    lost = []
    # Of an index that was given: one that was written anew, as by peft, has none of the former.
    kept = set() if index is None else {_place(weights.source(name)) for name in weights.index}
    for names, was, source in renamed:
        theirs = [one for one in map(weights.source, names) if one is not None]
        if source in theirs or (index is not None and theirs and _place(source) not in kept):
            continue
        if index is None and source is not None and weights.source(was) == source:
            found[was] = names
        else:
            lost.append(f"{names[0]} (was {was})")
    if lost:
        where = "offload_index" if folder is None else f"offload_dir={os.fspath(folder)!r}"
        raise ConfigError.of(
            f"{where}, weights {listed(lost)}",
            "they have other names than when they were offloaded, and their values do not lie "
            + ("under the present ones" if index is not None else "there as they did then"),
            "Pass the folder that they were offloaded to (without offload_index), or load the "
            "checkpoint anew; or delete and move modules while the hooks are attached.",
        )
    values = {was: weights[was] for was in found}  # mapped before any file is written
    for was, names in found.items():
        value = values[was].clone() if copy else values[was]
        set_module_tensor_to_device(model, names[0], "cpu", value=value)
        first, key = held_in(model, names[0])
        for held, other in (held_in(model, name) for name in names[1:]):
            held[other] = first[key]


def _place(source: tuple[str, str, Stamp] | None) -> tuple[str, str] | None:
    """Return the file of a weight and its name there, whatever the state of the file."""
    return source[:2] if source is not None else None


def _renamed(model: nn.Module) -> Iterator[_Renamed]:
    names: dict[int, tuple[Any, list[str]]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), (tensor, []))[1].append(name)
    for tensor, present in names.values():
        was, source = tensor.__dict__.get(ORIGIN, (present[0], None))
        if was not in present and tensor.is_meta:
            yield _Renamed(present, was, source)
