"""Weights of a checkpoint that stay on disk: listed where they lie, or written where they must."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from accel.weights.dtypes import name_of
from accel.weights.offload_folder import (
    Info,
    OffloadedWeightsLoader,
    drop_from_index,
    make_folder,
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

    def save(self, wanted: Iterable[str]) -> OffloadedWeightsLoader:
        """Write the index; of the names `wanted` on disk it has only those of this checkpoint.

        Returns:
            The weights of this checkpoint on disk, by name.
        """
        drop_from_index(set(wanted) - self.index.keys(), self.folder)
        save_offload_index(self.index, self.folder)
        return OffloadedWeightsLoader(save_folder=self.folder, index=self.index)
