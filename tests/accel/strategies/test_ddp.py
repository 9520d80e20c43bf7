"""DistributedDataParallel on gloo: the same training as in one process, on 2 and 3 (R1, E3)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from accel import Accelerator, DistributedDataParallelKwargs
from accel.config.handlers import GradScalerKwargs
from accel.machine.errors import ConfigError, StateError
from tests.helpers import gloo_threads, gloo_threads_left, run_distributed


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def only_evaluated() -> tuple[str, ...]:
    accelerator = Accelerator(cpu=True)
    prepared = (
        accelerator.prepare_model(make_model(), evaluation_mode=True),
        accelerator.prepare_model(make_model()),
        accelerator.prepare(make_model().requires_grad_(False)),
        accelerator.prepare(DistributedDataParallel(make_model())).module,
    )
    return tuple(type(model).__name__ for model in prepared)


def test_a_model_that_is_only_evaluated_needs_no_wrapper() -> None:
    kinds = ("Sequential", "DistributedDataParallel", "Sequential", "Sequential")
    assert run_distributed(only_evaluated, 2) == [kinds] * 2


# -- when gradients are exchanged ----------------------------------------------------------------


def unused_trigger() -> str:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(make_model())
    with pytest.raises(ConfigError) as caught, accelerator.trigger_sync_in_backward(model):
        pass
    return str(caught.value)


def test_a_sync_cannot_be_triggered_while_unused_parameters_are_looked_for() -> None:
    assert "find_unused_parameters" in run_distributed(unused_trigger, 2)[0]


def overflow() -> tuple[bool, float, bool]:
    handler = GradScalerKwargs(init_scale=64.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = weights(model)
    inputs = torch.full((1, 3), 1e30 if accelerator.process_index == 1 else 1.0)
    accelerator.backward(model(inputs).mean() * inputs.sum())
    optimizer.step()
    return (
        optimizer.step_was_skipped,
        accelerator.scaler.get_scale(),
        torch.equal(before, weights(model)),
    )


def test_an_overflow_on_one_process_skips_the_step_on_all() -> None:
    assert run_distributed(overflow, 2) == [(True, 32.0, True)] * 2


def strange_parameter() -> str:
    accelerator = Accelerator(cpu=True)
    model, lone = make_model(), torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(model, torch.optim.SGD([*model.parameters(), lone], lr=0.1))
    mapped = make_model()
    mapped.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(ConfigError, match="device map"):
        accelerator.prepare(mapped)
    return str(caught.value)


def test_a_parameter_that_nobody_keeps_equal_is_refused() -> None:
    assert "kept equal on all processes" in run_distributed(strange_parameter, 2)[0]


# -- the end ---------------------------------------------------------------------------------------


def ended() -> tuple[int, list[float], str]:
    before = gloo_threads()  # of groups that earlier functions left to this worker
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    accelerator.backward(model(torch.ones(2, 3)).sum())
    accelerator.end_training()
    accelerator.end_training()
    after = model(torch.zeros(1, 3)).flatten().tolist()
    with pytest.raises(StateError) as caught:
        accelerator.gather(torch.ones(1))
    return gloo_threads_left(before) - before, after, str(caught.value)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_nothing_of_the_group_outlives_the_training() -> None:
    first, second = run_distributed(ended, 2)
    assert max(first[0], second[0]) <= 0
    assert first[1] == second[1]
    assert "end_training" in first[2]
