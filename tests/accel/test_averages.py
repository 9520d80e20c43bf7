"""Averages of weights (EMA) under strategies that shard them: a deep copy is refused, and why.

Holds E5.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.machine.errors import StateError
from tests.accel.strategies.training import BATCH, Model, data, difference, loss_of
from tests.helpers import run_distributed

DECAY = 0.9
PLUGINS: dict[str, Any] = {
    "fsdp": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "zero3": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)},
}


def average(parameters: Any, others: Any) -> None:
    with torch.no_grad():
        for own, other in zip(parameters, others, strict=True):
            own.lerp_(other, 1 - DECAY)


def check_average(strategy: str) -> None:
    accelerator = Accelerator(cpu=True, **PLUGINS[strategy]())
    model, plain = Model(frozen=False), Model(frozen=False)
    whole, expected = copy.deepcopy(plain), copy.deepcopy(plain)
    sharded: Any = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    if strategy == "fsdp":  # the remedy that needs no gathering
        model, sharded, optimizer = accelerator.prepare(model, sharded, optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    for refused in (model, accelerator.unwrap_model(model)):
        with pytest.raises(StateError, match=r"get_state_dict\(model\)"):
            copy.deepcopy(refused)
        with pytest.raises(StateError, match="To average weights, copy the model before prepare"):
            torch.optim.swa_utils.AveragedModel(refused)
    for step in range(2):
        tokens, targets = data()[step * BATCH : (step + 1) * BATCH]
        accelerator.backward(loss_of(model, tokens, targets))
        loss_of(plain, tokens, targets).backward()
        for stepped in (optimizer, reference):
            stepped.step()
            stepped.zero_grad()
        state = accelerator.get_state_dict(model)
        average(whole.parameters(), [state[name] for name, _ in whole.named_parameters()])
        average(expected.parameters(), plain.parameters())
        if strategy == "fsdp":
            average(sharded.parameters(), model.parameters())
    assert difference(whole.state_dict(), expected.state_dict()) < 1e-6
    if strategy == "fsdp":
        found = accelerator.get_state_dict(sharded)
        assert difference(found, expected.state_dict()) < 1e-6
    accelerator.end_training()


@pytest.mark.parametrize("strategy", PLUGINS)
def test_a_copy_of_shards_is_refused_and_the_remedy_averages(strategy: str) -> None:
    run_distributed(check_average, 2, strategy)
