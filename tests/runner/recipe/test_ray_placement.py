"""Where in a Ray cluster processes run."""

from __future__ import annotations

import pytest

from accel.machine.errors import ConfigError
from runner.recipe.ray_placement import RayPlacement
from runner.recipe.schema import Distributed


def test_the_defaults_are_valid() -> None:
    assert Distributed(kind="ray", ray=RayPlacement()).ray.placement == "PACK"


def test_everything_that_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        RayPlacement(address="ray://head:10001", placement="EVERYWHERE", cpus=-1)
    text = str(raised.value)
    assert "placement='EVERYWHERE'" in text
    assert "STRICT_SPREAD" in text
    assert "cpus=-1" in text
    assert "distributed.ray.address=ray://head:10001" in text
    assert "ray job submit" in text


def test_keys_of_ray_without_ray_are_refused() -> None:
    with pytest.raises(ConfigError, match="Choose distributed=ray"):
        Distributed(kind="multi_cpu", ray=RayPlacement(cpus=2))
