"""R1: the GAN step trains alike on any number of processes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from accel import Accelerator
from accel.config.fsdp import FullyShardedDataParallelPlugin
from runner.builtin.digits import digits
from runner.builtin.gan import GANStep, frechet_distance
from runner.data.batches import MicroBatch, Window
from runner.recipe.schema import Trainer
from tests.helpers import run_distributed


def images(count: int) -> torch.Tensor:
    train = digits(augment=False).train
    assert isinstance(train, TensorDataset)
    return train.tensors[0][:count]


def prepared(accelerator: Accelerator, **arguments: float) -> GANStep:
    step = GANStep(width=16, latent=4, **arguments)  # type: ignore[arg-type]
    for name in step.models:
        step.models[name], step.optimizers[name] = accelerator.prepare(
            step.models[name], step.optimizers[name]
        )
    return step


def weights(step: GANStep, name: str) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in step.models[name].parameters()])


def window(real: torch.Tensor, num_micro_batches: int = 1, total: int | None = None) -> Window:
    parts = [MicroBatch([part, None]) for part in real.chunk(num_micro_batches)]
    return Window(parts, total or len(real))


def constant_noise(step: GANStep) -> None:
    """Let noise and perturbation be the same for every image, so that sums can be compared."""
    step.perturbation = 0.0
    step._noise = lambda accelerator, count: torch.ones(count, step.latent)  # type: ignore[method-assign]


def test_accumulation_and_padding_change_nothing() -> None:
    real = images(8)

    def train(accumulation: int, padded: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        step = prepared(accelerator)
        constant_noise(step)
        parts = window(real, accumulation)
        if padded:
            last = parts.micro_batches[-1]
            filled = torch.cat((last.batch[0], torch.rand(2, 1, 8, 8)))
            valid = torch.arange(len(filled)) < len(last.batch[0])
            parts.micro_batches[-1] = MicroBatch([filled, None], valid)
        losses = step.train(accelerator, parts, Trainer())
        return [losses["loss"], weights(step, "generator"), weights(step, "discriminator")]

    expected = train(1, padded=False)
    for accumulation, padded in ((2, False), (1, True), (2, True)):
        for value, other in zip(expected, train(accumulation, padded), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


def _train_in_parallel() -> tuple[list[float], list[float], list[float]]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(5)
    step = prepared(accelerator)
    noise = step._noise(accelerator, 2).flatten().tolist()
    constant_noise(step)
    size = 8 // accelerator.num_processes
    rank = accelerator.process_index
    for _ in range(2):
        own = images(8)[rank * size : (rank + 1) * size]
        step.train(accelerator, window(own, total=8), Trainer())
    return noise, weights(step, "generator").tolist(), weights(step, "discriminator").tolist()


@pytest.mark.slow
def test_two_processes_train_the_models_of_one() -> None:
    first, second = run_distributed(_train_in_parallel, 2)
    assert first[1:] == second[1:]
    assert first[0] != second[0]
    torch.manual_seed(5)
    _, generator, discriminator = run_distributed(_train_in_parallel, 1)[0]
    assert first[1] == pytest.approx(generator, rel=1e-3, abs=1e-4)
    assert first[2] == pytest.approx(discriminator, rel=1e-3, abs=1e-4)


def test_the_frechet_distance_of_gaussians_is_known() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(4000, 3, generator=generator, dtype=torch.float64)
    first = (first - first.mean(dim=0)) @ torch.linalg.inv(
        torch.linalg.cholesky(torch.cov(first.T, correction=0)).T
    )
    assert frechet_distance(first, first) == pytest.approx(0.0, abs=1e-9)
    # Unit covariance against means of 1 and standard deviations of 2: 3·1² + 3·(2 - 1)².
    assert frechet_distance(first, 2 * first + 1) == pytest.approx(6.0)


def losses_under(engine: str) -> list[float]:
    """Return both losses of four steps under DDP or FSDP."""
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin() if engine == "fsdp" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    step = prepared(accelerator)
    real = images(16)[accelerator.process_index :: 2]
    found = []
    for _ in range(4):
        values = step.train(accelerator, window(real, 2, 16), Trainer())
        shares = torch.stack([values["loss"], values["generator_loss"]])
        found += accelerator.reduce(shares, "sum").tolist()
    accelerator.end_training()
    return found


def test_the_models_train_alike_under_fsdp() -> None:
    expected = run_distributed(losses_under, 2, "ddp")[0]
    assert run_distributed(losses_under, 2, "fsdp")[0] == pytest.approx(expected, rel=1e-4)
