"""Micro-batches lie on the host until they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from runner.data.micro_batch_window import MicroBatch, OnDevice, Window, with_last

META = torch.device("meta")


def micro_batches(count: int = 3) -> list[MicroBatch]:
    valid = torch.tensor([True, False])
    return [MicroBatch([torch.full((2,), float(i)), "name"], valid) for i in range(count)]


def test_reading_moves_one_micro_batch() -> None:
    on_host = micro_batches()
    window = Window(OnDevice(on_host, META), 6)
    first = window.micro_batches[0]
    assert first.batch[0].is_meta
    assert first.batch[1] == "name"
    assert first.valid is not None
    assert first.valid.is_meta
    assert [micro.batch[0].device.type for micro in window.on_host] == ["cpu"] * 3
    assert all(micro.batch[0].is_meta for micro in window.micro_batches)
    assert len(window.micro_batches) == 3


def test_a_part_of_them_moves_likewise() -> None:
    read: Any = OnDevice(micro_batches(), META)[1:]
    assert len(read) == 2
    assert read[0].batch[0].is_meta


def test_micro_batches_may_lie_anywhere() -> None:
    on_host = micro_batches()
    assert Window(on_host, 6).on_host is on_host


@pytest.mark.parametrize("known", [True, False])
def test_the_last_window_of_an_epoch_is_marked(known: bool) -> None:
    def windows() -> Iterator[Window]:
        return (Window([], number) for number in range(2, 5))

    found = [(w.num_samples, last) for w, last in with_last(windows(), 2, 5 if known else None)]
    assert found == [(2, False), (3, False), (4, True)]
    assert list(with_last(iter(()), 0, None)) == []
