"""Schedulers as parts of a checkpoint."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from runner.training.schedule_state import ScheduleState


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_the_state_of_another_class_is_ignored() -> None:
    state = ScheduleState(StepLR(optimizer(), 1)).state_dict()
    plateau = ScheduleState(ReduceLROnPlateau(optimizer()))
    plateau.load_state_dict(state)
    assert plateau.replaced


def test_the_steps_of_a_schedule_are_restored() -> None:
    schedule = StepLR(optimizer(), 1)
    schedule.optimizer.step()
    schedule.step()
    restored = ScheduleState(StepLR(optimizer(), 1))
    restored.load_state_dict(ScheduleState(schedule).state_dict())
    assert not restored.replaced
    assert restored.num_steps == 1


def test_the_best_of_another_metric_is_reset() -> None:
    plateau = ReduceLROnPlateau(optimizer())
    plateau.step(0.5)
    scheduler = ReduceLROnPlateau(optimizer())
    state = ScheduleState(scheduler)
    state.load_state_dict(ScheduleState(plateau).state_dict())
    assert scheduler.best == 0.5
    assert not state.reset_best(remeasured=False)
    assert state.reset_best(remeasured=True)
    assert scheduler.best == math.inf
