"""Gradient accumulation: where windows end, what is exchanged when, and what the settings do.

Holds E3.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, GradientAccumulationPlugin
from accel.comm.ops import gather_object
from accel.config.deepspeed import DeepSpeedPlugin
from accel.state import AcceleratorState, GradientState
from tests.helpers import run_distributed

WORLD_SIZES = [1, 2]


def weight_of(model: torch.nn.Module) -> torch.nn.Parameter:
    """Return the one weight of a model that may be wrapped."""
    return next(model.parameters())


def scalar_model(weight: float = 1.0) -> torch.nn.Module:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return model


def own_input() -> torch.Tensor:
    """Return [1, 1], rank + 1; the mean over n processes is (n + 1) / 2."""
    return torch.full((1, 1), float(AcceleratorState().process_index + 1))


# -- where a window ends -------------------------------------------------------------------------


def sequence(
    num_steps: int, sync_with_dataloader: bool, inner: str = "none", epochs: int = 2
) -> list[tuple[bool, int]]:
    """Return (sync_gradients, step) of each micro-batch of passes over five batches.

    Args:
        num_steps: micro-batches per window.
        sync_with_dataloader: as the plugin's.
        inner: what happens after the second batch of each pass: "none", "evaluated" (a loader of
            two batches is read), "trained" (each of its batches is a micro-batch, too) or "left"
            (the pass is broken off after the third).
        epochs: how many passes.
    """
    plugin = GradientAccumulationPlugin(num_steps, sync_with_dataloader=sync_with_dataloader)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    samples = torch.ones(10 * accelerator.num_processes, 1)
    model = scalar_model()
    model, optimizer, train, other = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(samples), batch_size=2),
        DataLoader(TensorDataset(samples[: 4 * accelerator.num_processes]), batch_size=2),
    )
    found = []

    def micro_batch(inputs: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            before = weight_of(model).item()
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
            assert (weight_of(model).item() != before) == accelerator.sync_gradients
            assert (weight_of(model).grad is None) == accelerator.sync_gradients
            found.append((accelerator.sync_gradients, accelerator.step))

    for _ in range(epochs):
        for index, (inputs,) in enumerate(train):
            micro_batch(inputs)
            if index == 1 and inner in ("evaluated", "trained"):
                for (extra,) in other:
                    if inner == "trained":
                        micro_batch(extra)
            if index == 2 and inner == "left":
                break
    return found


def counted(num_steps: int, sequence_length: int) -> list[tuple[bool, int]]:
    """Return what a count that nothing interrupts gives."""
    return [(step % num_steps == 0, step) for step in range(1, sequence_length + 1)]


EPOCHS = {
    (1, True): [(True, 1), (True, 2), (True, 3), (True, 4), (True, 0)] * 2,
    (2, True): [(False, 1), (True, 2), (False, 3), (True, 4), (True, 0)] * 2,
    (3, True): [(False, 1), (False, 2), (True, 3), (False, 4), (True, 0)] * 2,
    (2, False): counted(2, 10),
    (3, False): counted(3, 10),
}
NESTED_TRAINING = [(False, 1), (False, 2), (False, 3), (True, 0), (False, 1), (False, 2), (True, 0)]


def nested_sequences() -> dict[str, list[tuple[bool, int]]]:
    return {
        "evaluated": sequence(3, True, "evaluated"),
        "trained": sequence(4, True, "trained", epochs=1),
        "counted": sequence(4, False, "trained", epochs=1),
        "left": sequence(2, True, "left"),
    }


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_only_the_end_of_the_innermost_loader_ends_a_window(world_size: int) -> None:
    for found in run_distributed(nested_sequences, world_size):
        assert found == {
            "evaluated": EPOCHS[3, True],
            "trained": NESTED_TRAINING,
            "counted": counted(4, 7),
            "left": counted(2, 6),
        }


@pytest.mark.parametrize(("num_steps", "sync_with_dataloader"), EPOCHS)
def test_a_window_ends_with_the_loader_unless_told_otherwise(
    num_steps: int, sync_with_dataloader: bool
) -> None:
    found = sequence(num_steps, sync_with_dataloader)
    assert found == EPOCHS[num_steps, sync_with_dataloader]


def test_without_a_loader_micro_batches_are_counted() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    found = []
    for _ in range(4):
        with accelerator.accumulate():
            found.append(accelerator.sync_gradients)
    assert found == [False, True, False, True]


# -- what the settings are -----------------------------------------------------------------------


def settings_of(**arguments: Any) -> GradientState:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **arguments).gradient_state


def test_the_plugins_settings_arrive() -> None:
    state = settings_of()
    assert (state.num_steps, state.adjust_scheduler) == (1, True)
    assert (state.sync_with_dataloader, state.sync_each_batch) == (True, False)
    state = settings_of(gradient_accumulation_plugin=GradientAccumulationPlugin(3, False, False))
    assert (state.num_steps, state.adjust_scheduler) == (3, False)
    assert (state.sync_with_dataloader, state.sync_each_batch) == (False, False)
    assert settings_of(gradient_accumulation_steps=4).num_steps == 4


def test_a_later_accelerator_that_says_nothing_keeps_the_micro_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    first = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    second = Accelerator(cpu=True)
    assert first.gradient_accumulation_steps == second.gradient_accumulation_steps == 4
    assert first.gradient_state.sync_with_dataloader is False
    assert "keeps gradient_accumulation_steps=4, which an earlier one" in caplog.text
    third = Accelerator(cpu=True, gradient_accumulation_steps=1)  # says so
    assert first.gradient_accumulation_steps == third.gradient_accumulation_steps == 1
    assert third.gradient_state.sync_with_dataloader is True
    Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert first.gradient_accumulation_steps == 2
    first.end_training()
    assert Accelerator(cpu=True).gradient_accumulation_steps == 1  # a run of its own


def test_the_environment_gives_the_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    accelerator = Accelerator(cpu=True)
    assert accelerator.gradient_accumulation_steps == 2
    assert accelerator.gradient_state.plugin_kwargs == {"num_steps": 2}


# -- what the state says -------------------------------------------------------------------------


def loader_facts() -> dict[str, Any]:
    """Return what the gradient state says during a pass over seven samples, two a batch."""
    accelerator = Accelerator(cpu=True)
    state = accelerator.gradient_state
    loader = accelerator.prepare(DataLoader(torch.arange(7), batch_size=2))
    other = accelerator.prepare(DataLoader(torch.arange(2), batch_size=2))
    ends, active = [], []
    for _ in loader:
        ends.append((state.end_of_dataloader, state.remainder))
        active.append(state.active_dataloader is loader)
    for _ in loader:
        for _ in other:
            active.append(state.active_dataloader is other)
            nested = state.dataloader_references == [None, loader, other]
        break
    return {
        "ends": ends,
        "active": all(active),
        "nested": nested,
        "distributed_type": str(state.distributed_type),
        "after": (state.active_dataloader, state.dataloader_references, state.end_of_dataloader),
    }


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_state_knows_the_loader_that_is_read(world_size: int) -> None:
    batches = {1: 4, 2: 2}[world_size]
    remainder = {1: 1, 2: 3}[world_size]
    for found in run_distributed(loader_facts, world_size):
        assert found == {
            "ends": [(False, -1)] * (batches - 1) + [(True, remainder)],
            "active": True,
            "nested": True,
            "distributed_type": "NO" if world_size == 1 else "MULTI_CPU",
            "after": (None, [None], False),
        }


def test_a_run_that_ended_within_a_window_leaves_none_open() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with accelerator.accumulate(scalar_model()):
        assert not accelerator.sync_gradients
    accelerator.end_training()
    accelerator, model = Accelerator(cpu=True), scalar_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = weight_of(model).item()
    accelerator.backward(model(torch.ones(2, 1)).sum())
    optimizer.step()
    assert weight_of(model).item() != before


# -- what is exchanged when ----------------------------------------------------------------------


def window_gradients(sync_each_batch: bool) -> dict[str, Any]:
    """Train two models with an optimizer each over a window of two micro-batches.

    Returns:
        The gradients of both after each micro-batch, and the weights after the steps. A third model
        is not given to `accumulate`.
    """
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    models = [scalar_model() for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models[:2]]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    gradients, weights = [], []
    for _ in range(2):
        with accelerator.accumulate(models[0], models[1]):
            outputs = [model(own_input()).sum() for model in models]
            accelerator.backward(outputs[0] + 2.0 * outputs[1] + outputs[2])
            gradients.append([weight_of(model).grad.item() for model in models])
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            weights.append([weight_of(model).item() for model in models[:2]])
    return {"gradients": gradients, "weights": weights}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_several_models_exchange_gradients_where_their_window_ends(world_size: int) -> None:
    mean = (world_size + 1) / 2
    for rank, found in enumerate(run_distributed(window_gradients, world_size, False)):
        own = rank + 1.0
        assert found["gradients"][0] == pytest.approx([own / 2, own, mean / 2])
        assert found["gradients"][1] == pytest.approx([mean, 2 * mean, mean])
        assert found["weights"][0] == [1.0, 1.0]
        assert found["weights"][1] == pytest.approx([1 - mean, 1 - 2 * mean])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_micro_batch_exchanges_gradients_if_told_so(world_size: int) -> None:
    mean = (world_size + 1) / 2
    for found in run_distributed(window_gradients, world_size, True):
        assert found["gradients"][0] == pytest.approx([mean / 2, mean, mean / 2])
        assert found["gradients"][1] == pytest.approx([mean, 2 * mean, mean])
        assert found["weights"][0] == [1.0, 1.0]


def gradients_of_two() -> dict[str, list[float]]:
    """Return the gradients of two models after backward passes in many contexts."""
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(scalar_model(), scalar_model())
    found: dict[str, list[float]] = {}

    def backward(*losses: torch.Tensor) -> None:
        for loss in losses:
            accelerator.backward(loss)

    def note(name: str) -> None:
        found[name] = [weight_of(model).grad.item() for model in (first, second)]
        first.zero_grad()
        second.zero_grad()

    with accelerator.no_sync():
        backward(first(own_input()).sum(), second(own_input()).sum())
        note("no_sync()")
    with accelerator.no_sync(first):
        backward(first(own_input()).sum(), second(own_input()).sum())
        note("no_sync(first)")
    with accelerator.no_sync():
        backward(first(own_input()).sum(), second(own_input()).sum())
    backward(first(own_input()).sum(), second(own_input()).sum())
    note("afterwards")
    with accelerator.no_sync():
        losses = [model(own_input()).sum() for model in (first, second) for _ in range(2)]
    with accelerator.no_sync():
        backward(losses[0], losses[2])
    with accelerator.trigger_sync_in_backward(first):
        backward(losses[1], losses[3])
    note("triggered for first")
    backward(first(own_input()).sum(), second(own_input()).sum())
    note("in the end")
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exchanges_can_be_put_off_and_triggered(world_size: int) -> None:
    mean = (world_size + 1) / 2
    for rank, found in enumerate(run_distributed(gradients_of_two, world_size)):
        own = rank + 1.0
        assert found == {
            "no_sync()": [own, own],
            "no_sync(first)": [own, mean],
            "afterwards": [2 * mean, 2 * mean],
            "triggered for first": [2 * mean, 2 * own],
            "in the end": [mean, mean],
        }


# -- processes with different numbers of batches -------------------------------------------------


def uneven(even_batches: bool | None) -> dict[str, Any]:
    """Train on five batches of two samples, which two or three processes cannot share evenly."""
    accelerator = Accelerator(cpu=True)
    inputs = torch.linspace(-1.0, 2.0, 10).view(10, 1)
    model = scalar_model()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(inputs, 3 * inputs), batch_size=2),
    )
    num_batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=even_batches):
        for batch, targets in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(batch), targets))
            optimizer.step()
            optimizer.zero_grad()
            num_batches += 1
    with (
        pytest.raises(KeyError),
        accelerator.join_uneven_inputs([model], even_batches=even_batches),
    ):
        raise KeyError("batch")
    return {"batches": num_batches, "after": len(loader), "weight": weight_of(model).item()}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_processes_that_run_out_of_batches_shadow_the_others(world_size: int) -> None:
    found = run_distributed(uneven, world_size, False)
    shares = {1: [5], 2: [3, 2]}[world_size]
    assert [entry["batches"] for entry in found] == shares
    assert [entry["after"] for entry in found] == [max(shares)] * world_size
    assert found[0]["weight"] != 1.0
    assert [entry["weight"] for entry in found] == [found[0]["weight"]] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_loaders_own_setting_holds_unless_told_otherwise(world_size: int) -> None:
    batches = {1: 5, 2: 3}[world_size]
    for setting in (None, True):
        for entry in run_distributed(uneven, world_size, setting):
            assert entry["batches"] == entry["after"] == batches


def batches_where_none_joins() -> list[int]:
    """Return how many batches of a loader each of two processes sees under DeepSpeed."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=0))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2))
    with (
        pytest.warns(UserWarning, match="DeepSpeed needs the same number of batches"),
        accelerator.join_uneven_inputs([], even_batches=False),
    ):
        return gather_object([len(list(loader))])


def test_batches_stay_even_where_processes_cannot_join() -> None:
    assert run_distributed(batches_where_none_joins, 2) == [[3, 3]] * 2
