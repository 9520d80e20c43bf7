"""The prepared scheduler: it steps when its optimizer did, once per process (E1, E3)."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.config.training import DataLoaderConfiguration, GradientAccumulationPlugin
from accel.optimizer import AcceleratedOptimizer
from accel.scheduler import AcceleratedScheduler
from accel.state import AcceleratorState, GradientState
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


def test_state_goes_out_and_in() -> None:
    optimizer, scheduler = make()
    optimizer.step()
    scheduler.step()
    _, other = make()
    other.load_state_dict(scheduler.state_dict())
    assert other.last_epoch == 1
    assert other.get_lr() == [0.5]


# -- the documented stepping, for many schedules ---------------------------------------------------

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "step": lambda optimizer: StepLR(optimizer, 3, 0.1),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=30),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 5),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 4),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, 0.1, 2), ExponentialLR(optimizer, 0.9)], milestones=[2]
    ),
}
MICRO_BATCHES = 5  # of a pass: the last window is short if two or three make a step


def plain_rates(name: str, num_steps: int) -> list[float]:
    """Return the rates of a schedule of plain torch after 0, 1, … of its steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = SCHEDULES[name](optimizer)
    rates = [schedule.get_last_lr()[0]]
    for _ in range(num_steps):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return rates


def prepared_rates(
    num_steps: int, step_with_optimizer: bool, split_batches: bool, adjust_scheduler: bool
) -> dict[str, list[float]]:
    """Return the rates of each schedule after the micro-batches of two passes."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps, adjust_scheduler),
        step_scheduler_with_optimizer=step_with_optimizer,
        dataloader_config=DataLoaderConfiguration(split_batches=split_batches),
    )
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    samples = 6 * MICRO_BATCHES * (1 if split_batches else accelerator.num_processes)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(samples, 1)), batch_size=6))
    pairs = {}
    for name, build in SCHEDULES.items():
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        pairs[name] = accelerator.prepare(inner, build(inner))
    rates: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for _ in range(2):
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).mean())
                for name, (optimizer, schedule) in pairs.items():
                    optimizer.step()
                    schedule.step()
                    rates[name].append(schedule.get_last_lr()[0])
                next(iter(pairs.values()))[0].zero_grad()
    return rates


def expected_rates(
    name: str, num_steps: int, step_with_optimizer: bool, per_step: int
) -> list[float]:
    """Return what the documentation says: a step of the optimizer is one of each process."""
    rates = plain_rates(name, 2 * MICRO_BATCHES * per_step)
    found, taken = [], 0
    for _ in range(2):
        for micro_batch in range(1, MICRO_BATCHES + 1):
            ends = micro_batch % num_steps == 0 or micro_batch == MICRO_BATCHES
            if not step_with_optimizer:
                taken += 1
            elif ends:
                taken += per_step
            found.append(rates[taken])
    return found


CASES = [
    (num_steps, step_with_optimizer, split_batches, adjust_scheduler)
    for num_steps in (1, 2, 3)
    for step_with_optimizer in (True, False)
    for split_batches in (True, False)
    for adjust_scheduler in (True, False)
]


def rates_of_all_cases() -> list[dict[str, list[float]]]:
    found = []
    for case in CASES:
        found.append(prepared_rates(*case))
        AcceleratorState._reset_state()
        GradientState._reset_state()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_of_the_optimizer_is_one_of_the_schedule_for_each_process(world_size: int) -> None:
    for found in run_distributed(rates_of_all_cases, world_size):
        for (num_steps, with_optimizer, split, _), rates in zip(CASES, found, strict=True):
            per_step = 1 if split else world_size
            for name in SCHEDULES:
                expected = expected_rates(name, num_steps, with_optimizer, per_step)
                assert rates[name] == pytest.approx(expected), (name, num_steps, split)


def plateau_rates(by_name: bool) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = ReduceLROnPlateau(inner, patience=1, factor=0.5)
    model, optimizer, plateau = accelerator.prepare(model, inner, plateau)
    rates = []
    for metric in (9.0, 1.0, 9.0, 2.0, 9.0, 3.0, 9.0, 4.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            plateau.step(metrics=metric) if by_name else plateau.step(metric)
            optimizer.zero_grad()
            rates.append(plateau.get_last_lr()[0])
    return rates


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plateau_counts_measurements_not_processes(world_size: int) -> None:
    """It sees 1, 2, 3, 4: the third one exhausts its patience, on any number of processes."""
    for by_name in (False, True):
        for rates in run_distributed(plateau_rates, world_size, by_name):
            assert rates == [1.0] * 5 + [0.5] * 3


def overrun() -> int:
    """Return the last step of a schedule of five after six calls."""
    accelerator = Accelerator(cpu=True)
    inner = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    optimizer = accelerator.prepare_optimizer(inner)
    schedule = accelerator.prepare_scheduler(OneCycleLR(inner, max_lr=1.0, total_steps=5))
    for _ in range(6):
        optimizer.step()
        schedule.step()
    return int(schedule.last_epoch)


@pytest.mark.parametrize("world_size", [1, 2])
def test_processes_together_stop_at_the_end_of_a_schedule(world_size: int) -> None:
    assert run_distributed(overrun, world_size) == [5] * world_size


# -- around it -------------------------------------------------------------------------------------


def order_warnings(adjust_scheduler: bool) -> list[str]:
    """Return the warnings of a window of two whose scheduler is called before its optimizer."""
    GradientState(GradientAccumulationPlugin(2, adjust_scheduler))
    optimizer, scheduler = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for sync in (False, True):
            GradientState()._set_sync_gradients(sync)
            scheduler.step()
            optimizer.step()
    return [str(warning.message) for warning in caught]


def test_calls_within_a_window_count_for_the_order_of_calls() -> None:
    assert order_warnings(adjust_scheduler=True) == []
    (message,) = order_warnings(adjust_scheduler=False)
    assert "before `optimizer.step()`" in message


def test_rates_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _, scheduler = make()
    scheduler.print_lr()
    assert capsys.readouterr().out == "Learning rate of group 0: 1.0000e+00\n"
    scheduler.scheduler.print_lr = print
    scheduler.print_lr("own", end="!")
    assert capsys.readouterr().out == "own!"
