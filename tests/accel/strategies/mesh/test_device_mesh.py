"""The mesh of a run is destroyed at its end with its process groups, and the model says so (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.machine.errors import StateError
from tests.accel.strategies.training import BATCH, Model, adamw, build, data, local_sizes, steps_of
from tests.helpers import run_distributed

Engines = dict[str, Any]


def trained(engines: Engines) -> tuple[Any, Any]:
    accelerator = build(**engines)
    model = Model()
    prepared = accelerator.prepare(model, adamw(model), DataLoader(data(1), BATCH))
    steps_of(accelerator, *prepared)
    return accelerator, prepared


def refused() -> tuple[str, dict[str, tuple[int, ...]]]:
    accelerator, (model, *_) = trained({"fsdp": {}})
    accelerator.end_training()
    with pytest.raises(StateError) as caught:
        model(torch.zeros(1, 4, dtype=torch.long))
    return str(caught.value), local_sizes(model)


def test_a_sharded_model_refuses_to_compute_after_the_end() -> None:
    for words, sizes in run_distributed(refused, 2):
        assert "destroyed by end_training()" in words
        assert sizes["embed.weight"] == (6, 8)  # what this process holds can still be read
