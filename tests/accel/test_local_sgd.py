"""Local SGD: two processes against the same arithmetic by hand, and where it does nothing (E1)."""

from __future__ import annotations

import pytest
import torch

from accel import Accelerator, FullyShardedDataParallelPlugin, LocalSGD
from accel.machine.errors import ConfigError
from tests.helpers import run_distributed

STEPS, RATE = 5, 0.1


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model[0].bias.requires_grad_(False)
    return model


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * rank + step))


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def by_hand(num_ranks: int, every: int) -> list[torch.Tensor]:
    """Train a model for each rank; average weights after `every` steps, and at the end."""
    models = [build() for _ in range(num_ranks)]
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], RATE) for m in models
    ]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        if (step + 1) % every == 0 or step + 1 == STEPS:
            with torch.no_grad():
                for together in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(p.clone() for p in together) / num_ranks
                    for parameter in together:
                        parameter.copy_(mean)
    return weights(models[0])


def trained(every: int, enabled: bool = True) -> tuple[list[torch.Tensor], list[bool], int]:
    """Return the weights, and after each step whether all ranks had the same."""
    accelerator = Accelerator(cpu=True)
    model = build()
    optimizer = sgd(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    agree = []
    with LocalSGD(accelerator, model, every, enabled) as local_sgd:
        for step in range(STEPS):
            with accelerator.accumulate(model):
                loss = model(batch(accelerator.process_index, step)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            everywhere = accelerator.gather(next(model.parameters()).detach()[None])
            agree.append(bool((everywhere == everywhere[0]).all()))
    accelerator.end_training()
    return weights(accelerator.unwrap_model(model)), agree, local_sgd.num_steps


@pytest.mark.parametrize("every", [1, 2, 8])
def test_two_processes_train_as_by_hand(every: int) -> None:
    results = run_distributed(trained, 2, every)
    expected = by_hand(2, every)
    for found, agree, num_steps in results:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert agree == [(step + 1) % every == 0 for step in range(STEPS)]
        assert num_steps == STEPS
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))


def test_without_it_gradients_are_averaged_at_every_step() -> None:
    results = run_distributed(trained, 2, 8, False)
    assert all(agree == [True] * STEPS for _, agree, _ in results)


def test_one_process_trains_as_ever() -> None:
    found, _, num_steps = trained(2)
    expected = by_hand(1, STEPS + 1)
    assert num_steps == STEPS
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def after_an_error() -> bool:
    """Return whether a model whose loop failed exchanges gradients again."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(build())
    with pytest.raises(KeyError), LocalSGD(accelerator, model, 2):
        raise KeyError
    model(batch(accelerator.process_index, 0)).square().mean().backward()
    gradient = next(p.grad for p in model.parameters() if p.grad is not None)
    everywhere = accelerator.gather(gradient[None])
    accelerator.end_training()
    return bool((everywhere == everywhere[0]).all())


def test_an_error_ends_it() -> None:
    assert run_distributed(after_an_error, 2) == [True, True]


def refused() -> str:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(build())
    with pytest.raises(ConfigError) as caught:
        LocalSGD(accelerator, model, 2)
    assert LocalSGD(accelerator, model, 2, enabled=False).enabled is False
    accelerator.end_training()
    return str(caught.value)


def test_a_sharded_model_is_refused() -> None:
    assert all("full model" in words for words in run_distributed(refused, 2))


def unprepared() -> str:
    accelerator = Accelerator(cpu=True)
    raw = build()
    model = accelerator.prepare(raw)
    LocalSGD(accelerator, model, 2)
    assert LocalSGD(accelerator, raw, 2, enabled=False).enabled is False
    with pytest.raises(ConfigError) as caught:
        LocalSGD(accelerator, raw, 2)
    accelerator.end_training()
    return str(caught.value)


def test_a_model_that_was_not_prepared_is_refused() -> None:
    for words in run_distributed(unprepared, 2):
        assert "Sequential that was not prepared" in words
        assert "Give the model that accelerator.prepare(model) returned" in words


def test_a_number_of_steps_that_is_none_is_refused() -> None:
    accelerator, model = Accelerator(cpu=True), build()
    for wrong in (0, 2.5, "8", None):
        with pytest.raises(ConfigError, match=r"local_sgd_steps=.*a whole number, at least 1"):
            LocalSGD(accelerator, model, wrong)  # type: ignore[arg-type]
