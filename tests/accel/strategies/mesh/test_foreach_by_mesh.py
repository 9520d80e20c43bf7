"""Optimizer steps over sharded and replicated parameters, with the kernels of GPUs (E3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest

from tests.accel.strategies.training import Model, build, difference, largest, plain, train
from tests.helpers import run_distributed

CLOSE = 1e-5


@contextmanager
def foreach_by_default() -> Iterator[None]:
    """Let torch choose ``foreach`` by itself on a CPU, too, as it does on a GPU."""
    module: Any = import_module("torch.optim.optimizer")
    known = module._get_foreach_kernels_supported_devices
    module._get_foreach_kernels_supported_devices = lambda: ["cpu", *known()]
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = known


def check_default_kernels(engines: dict[str, Any]) -> None:
    accelerator = build(**engines)
    with foreach_by_default():
        losses, _, weights = train(accelerator, Model())
    expected = plain(Model())
    assert largest(losses, expected[0]) < CLOSE
    assert difference(weights, expected[2]) < CLOSE


@pytest.mark.parametrize(
    "engines", [{"tp": {"tp_size": 2}}, {"fsdp": {"ignored_modules": "blocks.0"}}]
)
def test_the_default_optimizer_steps_parameters_of_all_kinds(
    engines: dict[str, Any],
) -> None:
    run_distributed(check_default_kernels, 2, engines)
