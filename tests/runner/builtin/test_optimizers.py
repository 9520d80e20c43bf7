"""C1, C2: built-in optimizers and schedules use what a recipe sets, or refuse it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from runner.builtin.optimizers import adamw, check_ranges, decay_groups
from tests.accel.precision.float8 import needs_torchao


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(2, 2))


def test_only_parameters_of_two_and_more_dims_are_decayed() -> None:
    module = model()
    optimizer = adamw(module, lr=0.1, weight_decay=0.3, betas=[0.8, 0.9], eps=1e-6)
    decayed, others = optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2, 4}
    assert {p.dim() for p in others["params"]} == {1}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    found = sum(len(group["params"]) for group in optimizer.param_groups)
    assert found == len(list(module.parameters()))
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.9), 1e-6)


@needs_torchao
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"state_format": "8bit"}, "AdamW8bit"),
        ({"state_format": "4bit"}, "AdamW4bit"),
        ({"state_format": "fp8"}, "AdamWFp8"),
        ({"stochastic_rounding": True}, "RoundingAdamW"),
        ({"state_format": "8bit", "stochastic_rounding": True}, "AdamW8bit"),
    ],
)
def test_torchaos_adamw_has_the_same_groups(options: dict[str, Any], kind: str) -> None:
    optimizer: Any = adamw(model(), lr=0.1, weight_decay=0.3, eps=1e-6, **options)
    assert type(optimizer).__name__ == kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert optimizer.param_groups[0]["eps"] == 1e-6
    assert optimizer.bf16_stochastic_round is ("stochastic_rounding" in options)


@needs_torchao
def test_moments_of_small_weights_are_in_fp32_beside_those_in_8_bits() -> None:
    layer = nn.Linear(64, 64).to(torch.bfloat16)
    optimizer = adamw(layer, state_format="8bit", stochastic_rounding=True)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert optimizer.state[layer.bias]["exp_avg_sq"].dtype == torch.float32
    assert type(optimizer.state[layer.weight]["exp_avg_sq"]).__name__ == "OptimState8bit"


def test_options_that_torchao_has_not_are_refused_together() -> None:
    with pytest.raises(ConfigError) as error:
        adamw(model(), state_format="9bit", fused=True)
    assert [p.value for p in error.value.problems] == [
        "optimizer.state_format='9bit'",
        "optimizer.fused=true with torchao's AdamW",
    ]


def test_every_number_outside_of_its_range_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_ranges("model", width=(5, 1, 4), rate=(math.inf, 0.0, math.inf), depth=(2, 1, 3))
    assert [str(problem.value) for problem in caught.value.problems] == [
        "model.width=5",
        "model.rate=inf",
    ]
    assert [problem.rule for problem in caught.value.problems] == [
        "it must be from 1 to 4",
        "it must be finite and at least 0",
    ]


def test_a_matrix_that_was_partitioned_while_it_was_built_is_decayed() -> None:
    matrix = torch.nn.Parameter(torch.empty(0))
    matrix.ds_shape = (3, 2)  # type: ignore[attr-defined] # of ZeRO-3
    assert decay_groups([matrix], 0.1) == [{"params": [matrix], "weight_decay": 0.1}]
