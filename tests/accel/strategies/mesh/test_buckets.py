"""Tensors in buckets: one call for each dtype, and values back in their places."""

from __future__ import annotations

import torch

from accel.strategies.mesh.buckets import apply_in_buckets, grouped


def test_tensors_are_grouped_in_the_order_of_their_first_members() -> None:
    tensors = [torch.zeros(1), torch.zeros(2, dtype=torch.float64), torch.zeros(3)]
    groups = grouped(tensors, lambda tensor: tensor.dtype)
    assert [[tensor.numel() for tensor in group] for group in groups] == [[1, 3], [2]]


def test_a_collective_is_called_once_for_each_dtype() -> None:
    first, second = torch.ones(2, 2), torch.full((3,), 2.0)
    other = torch.tensor(5, dtype=torch.int64)
    sizes = []

    def double(bucket: torch.Tensor) -> torch.Tensor:
        sizes.append((bucket.dtype, bucket.numel()))
        return bucket.mul_(2)

    parameter = torch.nn.Parameter(first)
    apply_in_buckets([parameter, other, second], double)
    assert sizes == [(torch.float32, 7), (torch.int64, 1)]
    assert torch.equal(first, torch.full((2, 2), 2.0))
    assert torch.equal(second, torch.full((3,), 4.0))
    assert other.item() == 10
