"""The scales of TransformerEngine's layers as plain tensors, for checkpoints.

Its layers give their scales and the histories of largest values as a pickle in a tensor of bytes
(`get_extra_state`), which runs code when it is read. Files hold what is inside: tensors and plain
values by name. The pickle that a layer reads is made in this process, of those and the run's own
recipe.

Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch

from accel.logging import get_logger
from accel.machine.errors import CheckpointError, Problem

logger = get_logger(__name__)

RECIPE = "recipe"  # the one entry that is no plain value
PLAIN = (torch.Tensor, bool, int, float, str, list, tuple, dict, type(None))


def read(model: torch.nn.Module) -> dict[str, dict[str, object]]:
    """Return the scales of the layers of a model, by name; layers without any are left out."""
    found: dict[str, dict[str, object]] = {}
    for name, layer in layers(model).items():
        state: Any = layer.get_extra_state()
        if isinstance(state, torch.Tensor) and state.numel() > 0:
            # Of the layer in this process, not of a file.
            entries = pickle.loads(state.cpu().numpy().tobytes())
            found[name] = {k: v for k, v in entries.items() if k != RECIPE and isinstance(v, PLAIN)}
        elif state is not None and not isinstance(state, torch.Tensor):
            logger.warning_once(
                "The scales of %s are not saved: this release of TransformerEngine gives them as "
                "%s. They start anew in a run that is resumed.",
                type(layer).__name__,
                type(state).__name__,
            )
    return found


def write(
    model: torch.nn.Module, scales: Mapping[str, Mapping[str, object]], recipe: object
) -> None:
    """Give the layers of a model the scales that `read` returned.

    Args:
        model: with the same layers.
        scales: by name of the layer.
        recipe: TransformerEngine's, of this run.

    Raises:
        CheckpointError: if a layer is missing, or does not take them.
    """
    known = layers(model)
    for name, entries in scales.items():
        try:
            blob = bytearray(pickle.dumps({**entries, RECIPE: recipe}))
            known[name].set_extra_state(torch.frombuffer(blob, dtype=torch.uint8))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            rule = f"the scales of a layer in fp8 do not fit: {error}"
            remedy = "Resume with the same model and fp8 recipe, or without fp8."
            raise CheckpointError(Problem(f"layer {name!r}", rule, remedy)) from error


def layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers of TransformerEngine in a model that keep extra state, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer).__module__.startswith("transformer_engine")
        and type(layer).get_extra_state is not torch.nn.Module.get_extra_state
    }
