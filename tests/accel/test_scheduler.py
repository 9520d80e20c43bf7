"""The prepared scheduler: it steps when its optimizer did, once per process."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from accel import Accelerator
from accel.config.training import DataLoaderConfiguration, GradientAccumulationPlugin
from accel.optimizer import AcceleratedOptimizer
from accel.scheduler import AcceleratedScheduler
from accel.state import GradientState
from tests.helpers import run_distributed


def make(step_with_optimizer: bool = True) -> tuple[AcceleratedOptimizer, AcceleratedScheduler]:
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = AcceleratedOptimizer(inner)
    schedule = LambdaLR(inner, lambda step: 1 / (1 + step))
    return optimizer, AcceleratedScheduler(schedule, optimizer, step_with_optimizer)


def test_it_steps_at_the_end_of_a_window() -> None:
    optimizer, scheduler = make()
    for sync in (False, False, True):
        GradientState()._set_sync_gradients(sync)
        optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 1
    assert scheduler.get_last_lr() == [0.5]


def test_it_does_not_step_where_the_optimizer_did_not() -> None:
    optimizer, scheduler = make()
    optimizer.step_was_skipped = True
    scheduler.step()
    assert scheduler.last_epoch == 0
    optimizer.step_was_skipped = False
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_one_of_its_own_steps_whenever_it_is_called() -> None:
    optimizer, scheduler = make(step_with_optimizer=False)
    optimizer.step()
    GradientState()._set_sync_gradients(False)
    scheduler.step()
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize(("adjust", "count"), [(True, 3), (False, 2)])
def test_calls_within_a_window_are_counted_if_the_plugin_says_so(adjust: bool, count: int) -> None:
    GradientState(GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust))
    optimizer, scheduler = make()
    for sync in (False, True):
        GradientState()._set_sync_gradients(sync)
        optimizer.step()
        scheduler.step()
    assert scheduler.scheduler._step_count == count
    assert scheduler.last_epoch == 1


def test_a_schedule_with_an_end_is_not_driven_past_it() -> None:
    inner = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    optimizer = AcceleratedOptimizer(inner)
    scheduler = AcceleratedScheduler(OneCycleLR(inner, max_lr=1.0, total_steps=4), optimizer)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 4


def test_state_goes_out_and_in() -> None:
    optimizer, scheduler = make()
    optimizer.step()
    scheduler.step()
    _, other = make()
    other.load_state_dict(scheduler.state_dict())
    assert other.last_epoch == 1
    assert other.get_lr() == [0.5]


def test_a_plain_optimizer_will_do() -> None:
    inner = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = AcceleratedScheduler(LambdaLR(inner, lambda step: 0.5), [inner])
    inner.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def last_epochs(split_batches: bool) -> list[int]:
    config = DataLoaderConfiguration(split_batches=split_batches)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=1.0), patience=0)
    model, optimizer, schedule, plateau = accelerator.prepare(
        model, inner, LambdaLR(inner, lambda step: 1.0), plateau
    )
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    schedule.step()
    plateau.step(1.0)
    return [schedule.last_epoch, plateau.last_epoch]


def test_it_steps_once_per_process_unless_batches_are_split() -> None:
    assert run_distributed(last_epochs, 2, False) == [[2, 1], [2, 1]]
    assert run_distributed(last_epochs, 2, True) == [[1, 1], [1, 1]]
