"""Weights that were loaded to the disk before their model is dispatched: where their values lie."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch
from torch import nn

from accel.machine.errors import ConfigError, listed
from accel.weights.offload_folder import (
    OffloadedWeightsLoader,
    PathLike,
)
from accel.weights.offloaded_tensors import ORIGIN, is_left


def remember(tensor: torch.Tensor, weights: OffloadedWeightsLoader, name: str) -> None:
    """Note in a tensor without data where its values lie: its module may get another name.

    Args:
        tensor: of a module.
        weights: have its values.
        name: of it there.
    """
    tensor.__dict__.setdefault(ORIGIN, {})[name] = weights.source(name)


def check_left(model: nn.Module, folder: PathLike, given: Collection[str] = ()) -> None:
    """Refuse weights without data whose values do not lie where they were loaded to.

    By its present name in the folder, a weight whose layer was moved, or whose file another model
    has written since, would get the values of another.

    Args:
        model: without hooks of a dispatch.
        folder: of offloaded weights.
        given: names of weights that get other values.

    Raises:
        ConfigError: naming them.
    """
    names: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), (tensor, []))[1].append(name)
    weights = OffloadedWeightsLoader(save_folder=folder)
    lost = [
        present[0]
        for tensor, present in names.values()
        if not any(name in given for name in present) and _is_lost(tensor, present, weights)
    ]
    if lost:
        raise ConfigError.of(
            f"offload_dir={os.fspath(folder)!r}, weights {listed(lost)}",
            "their values do not lie there as they were loaded: their layers were moved, or files "
            "were written or removed since",
            "Load the checkpoint anew; or dispatch the model before layers are moved or deleted.",
        )


def _is_lost(tensor: torch.Tensor, names: list[str], weights: OffloadedWeightsLoader) -> bool:
    if ORIGIN not in tensor.__dict__:
        return is_left(tensor)
    loaded = tensor.__dict__[ORIGIN]
    return any(name not in loaded or weights.source(name) != loaded[name] for name in names)
