"""Torch's errors of a training step in the words of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from runner.recipe import user_frames
from runner.training import torch_errors
from runner.training.metrics import NonFiniteError
from tests.helpers import run_distributed


class Forked(nn.Module):
    """A model with a layer that never takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def train_forked() -> str:
    from accel import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Forked())
    try:
        with torch_errors.translated({"model": model}, lambda: 0):
            for _ in range(2):
                accelerator.backward(model(torch.ones(4, 2)).sum())
    except ConfigError as error:
        return str(error)
    return "no error"


def test_unused_parameters_name_themselves_and_the_key() -> None:
    for answer in run_distributed(train_forked, 2):
        assert answer.startswith("spare.weight, spare.bias got no gradient in a step")
        assert "distributed.ddp.find_unused_parameters=true" in answer


def test_an_anomaly_names_the_operation_and_the_line(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.zeros(1, requires_grad=True)
    with pytest.raises(NonFiniteError) as caught:
        with torch.autograd.set_detect_anomaly(True), torch_errors.translated({}, lambda: 6):
            (x.sqrt() * 0).sum().backward()
    text = str(caught.value)
    assert "SqrtBackward0 gave a gradient that is NaN at step 7 (forward: " in text
    assert f"{Path(__file__).name}:" in text
    assert not [w for w in recwarn if "Error detected" in str(w.message)]
    assert (
        user_frames.formatted(caught.value) == []
        or "Traceback" in user_frames.formatted(caught.value)[0]
    )


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), torch_errors.translated({}, lambda: 0):
        torch.ones(2, 3) @ torch.ones(2, 3)
