"""Attention layers that evaluate on a CPU compute under autocast, as they are trained (E3)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.backends import mha

from accel import Accelerator
from tests.accel.precision.float8 import needs_torchao


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    mha.set_fastpath_enabled(True)


def encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    stack = torch.nn.TransformerEncoder(layer, 2)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), stack, torch.nn.Linear(32, 32))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=needs_torchao)])
def test_evaluation_computes_in_the_format_of_training(precision: str, compiled: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(encoder())
    values = torch.randn(3, 6, 32)
    trained = model(values).detach()
    model.eval()
    call = torch.compile(model, backend="eager", fullgraph=precision == "bf16")
    with torch.no_grad():
        assert torch.equal((call if compiled else model)(values), trained)
