"""Plugins for accumulation, compilation and the project folder (E1, E5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel.config.training import (
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.machine.enums import DynamoBackend
from accel.machine.errors import ConfigError


def test_logs_go_to_the_project_unless_they_have_a_folder() -> None:
    assert ProjectConfiguration("here").logging_dir == "here"
    assert ProjectConfiguration("here", "there").logging_dir == "there"
    later = ProjectConfiguration()
    later.set_directories(Path("later"))
    assert (later.project_dir, later.logging_dir) == ("later", "later")


@pytest.mark.parametrize("backend", ["inductor", "INDUCTOR", DynamoBackend.INDUCTOR])
def test_a_backend_is_named_in_any_case(backend: Any) -> None:
    assert TorchDynamoPlugin(backend=backend).backend == DynamoBackend.INDUCTOR
    assert TorchDynamoPlugin(backend=None).backend == DynamoBackend.NO


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (GradientAccumulationPlugin, {"num_steps": 0}, "num_steps=0"),
        (ProjectConfiguration, {"total_limit": 0, "iteration": -1}, "total_limit=0(.|\n)*=-1"),
        (TorchDynamoPlugin, {"backend": "inductr"}, "Did you mean 'inductor'"),
        (TorchDynamoPlugin, {"mode": "max"}, "mode='max'"),
        (TorchDynamoPlugin, {"options": 3}, "options=3"),
        (TorchDynamoPlugin, {"backend": "eager", "mode": "max-autotune"}, "only inductor"),
        (
            TorchDynamoPlugin,
            {"backend": "inductor", "mode": "max-autotune", "options": {"x": 1}},
            "Give one of the two",
        ),
    ],
)
def test_wrong_values_are_named(kind: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**arguments)
