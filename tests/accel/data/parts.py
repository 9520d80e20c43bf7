"""Data sets and loaders that the tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel.data.prepare import prepare_data_loader


class Counting(Dataset):
    """The numbers below `length`; notes what was fetched."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.fetched: list[int] = []
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stream(IterableDataset):
    """The numbers below `length`."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def __iter__(self):
        return iter(range(self.length))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Moving:
    """A batch that notes how it is moved."""

    def __init__(self) -> None:
        self.moves: list[tuple[Any, bool]] = []

    def to(self, device: Any, non_blocking: bool = False) -> Moving:
        self.moves.append((torch.device(device), non_blocking))
        return self


def values(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def prepared(length: int, size: int, count: int = 1, rank: int = 0, drop_last=False, **flags):
    loader = DataLoader(range(length), batch_size=size, drop_last=drop_last)
    return prepare_data_loader(loader, num_processes=count, process_index=rank, **flags)


def flat(loader: Any) -> list[int]:
    return [index for batch in values(loader) for index in batch]
