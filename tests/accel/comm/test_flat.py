"""Tensors are exchanged with one call for each dtype."""

from __future__ import annotations

import torch

from accel.comm.base import by_dtype, exchange_flat

TENSORS = [
    torch.arange(6.0).reshape(2, 3),
    torch.tensor([7, 8]),
    torch.tensor(9.0),
    torch.empty(0, 4),
]


def test_tensors_of_one_dtype_are_together() -> None:
    assert by_dtype(TENSORS) == [[0, 2, 3], [1]]
    assert by_dtype([]) == []


def test_answers_have_the_shapes_of_their_tensors() -> None:
    calls = []

    def exchange(flat: torch.Tensor) -> torch.Tensor:
        calls.append(flat.dtype)
        return torch.cat([flat, flat * 2])

    answers = exchange_flat(TENSORS, exchange)
    assert calls == [torch.float32, torch.int64]
    for tensor, answer in zip(TENSORS, answers, strict=True):
        assert torch.equal(answer, torch.stack([tensor, tensor * 2]))


def test_nothing_but_empty_tensors() -> None:
    (answer,) = exchange_flat([torch.empty(0, 4)], lambda flat: flat)
    assert answer.shape == (1, 0, 4)
