"""Weights of a checkpoint that stay on disk: listed where they lie, or written where they must."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from accel.checkpoint.offload_folder import (
    Info,
    load_offloaded_weight,
    offload_weight,
    save_offload_index,
)


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
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stored = stored
        self.index: dict[str, Info] = {}

    def add(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> None:
        """Add a weight that was read from the checkpoint, in the dtype that it is wanted in."""
        if name in self.stored and value.dtype == dtype:
            path, key = self.stored[name]
            entry: Info = {"safetensors_file": str(path.resolve()), "weight_name": key}
            self.index[name] = {
                **entry,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": list(value.shape),
            }
        else:
            offload_weight(value.to(dtype), name, self.folder, self.index)

    def tie(self, groups: Sequence[Iterable[str]], wanted: Iterable[str]) -> None:
        """Add the names of tied weights, of those `wanted` on disk, that the checkpoint lacks."""
        lacking = set(wanted) - self.index.keys()
        for group in groups:
            names = set(group)
            known = next((name for name in sorted(names) if name in self.index), None)
            for name in sorted(names & lacking) if known is not None else ():
                self._add_again(str(known), name)

    def _add_again(self, known: str, name: str) -> None:
        if "safetensors_file" in self.index[known]:
            self.index[name] = self.index[known]
        else:
            value = load_offloaded_weight(self.folder / f"{known}.dat", self.index[known])
            offload_weight(value, name, self.folder, self.index)

    def save(self) -> None:
        """Write the index."""
        save_offload_index(self.index, self.folder)
