"""The plugin of tensor parallelism (E1, E5)."""

from __future__ import annotations

from typing import Any

import pytest

from accel.config.tensor_parallel import TorchTensorParallelPlugin, plan_problems
from accel.machine.errors import ConfigError


class Mesh:
    """Has the axes of a `DeviceMesh` and their sizes."""

    def __init__(self, **sizes: int) -> None:
        self.sizes, self.mesh_dim_names = sizes, tuple(sizes)

    def __getitem__(self, name: str) -> Mesh:
        return Mesh(**{name: self.sizes[name]})

    def size(self) -> int:
        return next(iter(self.sizes.values()))


def test_the_size_is_that_of_the_mesh() -> None:
    assert TorchTensorParallelPlugin(torch_device_mesh=Mesh(dp=2, tp=4)).tp_size == 4
    assert TorchTensorParallelPlugin(tp_size=4, torch_device_mesh=Mesh(tp=4)).tp_size == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 0}, "tp_size=0"),
        ({"torch_device_mesh": Mesh(dp=2)}, "one of its axes is named 'tp'"),
        ({"tp_size": 2, "torch_device_mesh": Mesh(tp=4)}, "tp_size=2"),
        ({"tp_plan": {}}, "tp_plan={}"),
        ({"tp_plan": {"up": "colwize"}}, "Did you mean 'colwise'"),
    ],
)
def test_wrong_values_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchTensorParallelPlugin(**arguments)


def test_names_of_styles_of_transformers_are_known() -> None:
    plan = {"a": "colwise", "b": "embedding_rowwise", "c": object()}
    assert plan_problems("tp_plan", plan) == []
