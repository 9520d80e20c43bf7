"""Taking objects in: what `prepare` makes of each kind, and what it refuses (E1)."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.data.loaders import DataLoaderShard
from accel.machine.errors import ConfigError
from accel.optimizer import AcceleratedOptimizer
from accel.scheduler import AcceleratedScheduler
from accel.state import AcceleratorState
from accel.strategies.base import Objects
from tests.accel.test_accelerator import loader, parts

# -- preparing ---------------------------------------------------------------------------------


def test_prepare_keeps_the_order_of_its_arguments() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches, schedule = parts()
    prepared = accelerator.prepare(schedule, batches, model, None, optimizer)
    kinds = [type(item) for item in prepared]
    assert kinds == [
        AcceleratedScheduler,
        DataLoaderShard,
        torch.nn.Linear,
        type(None),
        AcceleratedOptimizer,
    ]
    assert prepared[0].optimizers == [prepared[4]]
    assert accelerator._models == [model]
    assert accelerator._optimizers == [prepared[4]]
    assert accelerator._schedulers == [prepared[0]]
    assert accelerator._dataloaders == [prepared[1]]
    assert accelerator._custom_objects == []


def test_what_is_prepared_already_stays_as_it_is() -> None:
    accelerator = Accelerator(cpu=True)
    once = accelerator.prepare(*parts())
    assert accelerator.prepare(*once) == once
    assert len(accelerator._models) == len(accelerator._optimizers) == 1
    assert accelerator.prepare_model(once[0]) is once[0]
    assert accelerator.prepare_optimizer(once[1]) is once[1]
    assert accelerator.prepare_data_loader(once[2]) is once[2]
    assert accelerator.prepare_scheduler(once[3]) is once[3]


def test_other_objects_come_back_with_a_warning() -> None:
    accelerator = Accelerator(cpu=True)
    numbers = [1, 2]
    with pytest.warns(UserWarning, match="list is no model"):
        _, same = accelerator.prepare(torch.nn.Linear(1, 1), numbers)
    assert same is numbers


def test_a_strategy_changes_the_batches_of_prepared_loaders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrap_loader(loader: DataLoaderShard) -> DataLoaderShard:
        loader.transform = lambda batch: -batch
        return loader

    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator.strategy, "wrap_loader", wrap_loader)
    batches = accelerator.prepare(DataLoader(range(1, 7), batch_size=2))
    ends = []
    for batch in accelerator.skip_first_batches(batches, 1):
        ends.append((batch.tolist(), accelerator.gradient_state.end_of_dataloader))
    assert ends == [([-3, -4], False), ([-5, -6], True)]
    assert accelerator._dataloaders == [batches]


class Average:
    """Has a step and a state, and is no scheduler: an average of weights, say."""

    calls = 0

    def step(self) -> None:
        self.calls += 1

    def state_dict(self) -> dict:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict) -> None:
        self.calls = state["calls"]


class Schedule(Average):
    def get_last_lr(self) -> list[float]:
        return [0.1]


def test_a_scheduler_of_the_users_own_needs_no_base_class() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = parts()
    _, optimizer, schedule = accelerator.prepare(model, optimizer, Schedule())
    optimizer.step()
    schedule.step()
    assert schedule.calls == 1
    assert schedule.optimizers == [optimizer]
    assert isinstance(accelerator.prepare_scheduler(Average()), AcceleratedScheduler)


def test_a_scheduler_may_be_prepared_before_its_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    model, inner, _, schedule = parts()
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    model, other = accelerator.prepare(model, other)
    schedule = accelerator.prepare_scheduler(schedule)
    lone = accelerator.prepare_scheduler(Schedule())
    optimizer = accelerator.prepare(inner)
    assert schedule.optimizers == [optimizer]
    assert lone.optimizers == [other, optimizer]
    for skipped, rates in ((True, [0.1]), (False, [0.05])):
        other.step_was_skipped, optimizer.step_was_skipped = False, skipped
        optimizer.step()
        schedule.step()
        assert schedule.get_last_lr() == rates


def test_device_placement_is_told_for_each_object() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches, schedule = parts()
    _, optimizer, batches, _ = accelerator.prepare(
        model, optimizer, batches, schedule, device_placement=[True, False, False, None]
    )
    assert optimizer.device_placement is False
    assert batches.device is None
    other = accelerator.prepare_data_loader(loader())
    assert other.device == torch.device("cpu")
    with pytest.raises(ConfigError, match="1 entries for 2 objects"):
        accelerator.prepare(loader(), loader(), device_placement=[True])


def test_an_optimizer_of_replaced_parameters_is_refused() -> None:
    class Replacing(torch.nn.Linear):
        def to(self, *args: object, **kwargs: object) -> torch.nn.Module:
            self.weight = torch.nn.Parameter(self.weight.detach().clone())
            return self

    model = Replacing(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="would never be trained"):
        Accelerator(cpu=True).prepare(model, optimizer)


def test_a_parameter_of_no_model_on_another_device_is_refused() -> None:
    model, lone = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.zeros(1, device="meta"))
    optimizer = torch.optim.SGD([*model.parameters(), lone], lr=0.1)
    with pytest.raises(ConfigError, match="1 parameter of optimizer 0 in no prepared model"):
        Accelerator(cpu=True).prepare(model, optimizer)


class Moved(torch.nn.Linear):
    """Remembers where it was moved to."""

    places: tuple[str, ...] = ()

    def to(self, device: torch.device) -> torch.nn.Module:  # type: ignore[override]
        self.places += (str(device),)
        return self


def test_a_model_is_moved_unless_told_otherwise() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare_model(Moved(1, 1)).places == ("cpu",)
    assert accelerator.prepare_model(Moved(1, 1), device_placement=False).places == ()
    assert accelerator.prepare(Moved(1, 1), device_placement=[False]).places == ()
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, device_placement=False)
    assert accelerator.device_placement is False
    assert accelerator.prepare_model(Moved(1, 1)).places == ()
    assert accelerator.prepare_model(Moved(1, 1), device_placement=True).places == ("cpu",)


def test_an_optimizer_and_its_scheduler_are_prepared_alone() -> None:
    accelerator = Accelerator(cpu=True)
    _, inner, _, schedule = parts()
    optimizer = accelerator.prepare_optimizer(inner)
    assert (optimizer.optimizer, optimizer.device_placement) == (inner, True)
    other = accelerator.prepare_optimizer(parts()[1], device_placement=False)
    assert other.device_placement is False
    prepared = accelerator.prepare_scheduler(schedule)
    assert (prepared.scheduler, prepared.optimizers) == (schedule, [optimizer])
    assert accelerator._optimizers == [optimizer, other]


def test_device_maps_are_found() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert accelerator.verify_device_map(model) is False
    model[0].hf_device_map = {"": 0}
    assert accelerator.verify_device_map(model) is False
    model[0].hf_device_map = {"a": 0, "b": 1}
    assert accelerator.verify_device_map(model) is True
    accelerator.prepare(model)  # one process may spread it


def test_free_memory_lets_go_of_everything() -> None:
    accelerator = Accelerator(cpu=True)
    model, *_ = accelerator.prepare(*parts())
    accelerator.step = 3
    assert accelerator.free_memory(model, "more") == [None, None]
    assert accelerator._objects == Objects()
    assert accelerator.step == 0
    accelerator.prepare(model)
    assert accelerator.clear() == []
    assert accelerator._models == []


def test_what_was_prepared_is_marked() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), DataLoader([0.0])
    assert not any(hasattr(item, "_is_accelerator_prepared") for item in given)
    for item in Accelerator(cpu=True).prepare(*given):
        assert item._is_accelerator_prepared is True
        assert item._is_accelerate_prepared is True
