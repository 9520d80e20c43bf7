"""Bytes that one process holds, known before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.machine.memory import num_bytes, state_bytes


def test_each_tensor_is_counted_once() -> None:
    weight, half = torch.zeros(3, 4), torch.zeros(2, dtype=torch.bfloat16)
    assert num_bytes([weight, weight, half]) == 3 * 4 * 4 + 2 * 2
    assert num_bytes([torch.empty(5, device="meta")]) == 20


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.RMSprop, {"centered": True}),
    ],
)
def test_the_estimate_is_the_size_after_a_step(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    optimizer = kind(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    estimate = state_bytes(optimizer)
    assert not optimizer.state
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert estimate == state_bytes(optimizer)


def test_some_optimizers_have_no_estimate() -> None:
    class Own(torch.optim.SGD):
        """Is not torch's."""

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert state_bytes(Own(parameters, lr=0.1)) is None
    assert state_bytes(torch.optim.LBFGS(parameters)) is None
    assert state_bytes(torch.optim.Adafactor(parameters)) is None


def test_an_estimate_may_be_over_other_tensors() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(100))], lr=0.1, momentum=0.9)
    assert state_bytes(optimizer, [torch.zeros(3)]) == 12
