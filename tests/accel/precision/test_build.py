"""From a plan to its number format."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from accel.env import Environment
from accel.errors import ConfigError
from accel.planning.arguments import Arguments
from accel.planning.plan import resolve
from accel.precision.amp import AmpPrecision
from accel.precision.build import build_precision


def test_a_plan_names_its_format() -> None:
    full = resolve(Arguments(cpu=True), Environment())
    half = resolve(Arguments(cpu=True, mixed_precision="bf16"), Environment())
    assert not isinstance(build_precision(full), AmpPrecision)
    built = build_precision(half)
    assert isinstance(built, AmpPrecision)
    with built.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_a_format_without_computation_is_refused() -> None:
    plan = dataclasses.replace(resolve(Arguments(cpu=True), Environment()), mixed_precision="fp8")
    with pytest.raises(ConfigError, match="mixed_precision='fp8'"):
        build_precision(plan)
