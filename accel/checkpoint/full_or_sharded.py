"""States of models and optimizers in a checkpoint, whichever kind of state dict was saved.

`torch.distributed.checkpoint` is imported for sharded ones only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.checkpoint import serialization
from accel.checkpoint.directory import (
    METADATA,
    numbered,
    sharded_model_name,
    sharded_optimizer_name,
)

if TYPE_CHECKING:
    from accel.checkpoint.sharded import Allocate


def read_model(folder: Path, index: int = 0, allocate: Allocate | None = None) -> dict[str, Any]:
    """Return the state dict of the `index`-th model; files that the manifest lacks do not count.

    Args:
        folder: the checkpoint.
        index: number of the model.
        allocate: returns what a sharded state dict is read into; None: full tensors on the CPU.

    Raises:
        CheckpointError: if there is none, or it is broken.
    """
    name = sharded_model_name(index)
    if not is_held(folder, name):
        return serialization.read_model(folder, index)
    from accel.checkpoint import sharded, sharded_state

    return sharded_state.read_model(folder / name, allocate or sharded.empty)


def read_optimizer(
    folder: Path, index: int = 0, allocate: Allocate | None = None, pickled_arrays: bool = False
) -> Any:
    """Return the state of the `index`-th optimizer; arguments and errors as of `read_model`.

    `pickled_arrays`: as of `serialization.load_plain`.
    """
    name = sharded_optimizer_name(index)
    if not is_held(folder, name):
        path = folder / numbered("optimizer", ".bin", index)
        return serialization.load_plain(path, pickled_arrays=pickled_arrays)
    from accel.checkpoint import sharded, sharded_state

    return sharded_state.read_optimizer(folder / name, index, allocate or sharded.empty)


def is_held(folder: Path, name: str) -> bool:
    """Return whether a checkpoint holds sharded state in its folder `name`."""
    described = f"{name}/{METADATA}"
    held = serialization.held(folder)
    return (folder / described).is_file() if held is None else described in held
