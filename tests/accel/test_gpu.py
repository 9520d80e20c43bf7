"""What only a CUDA device can show: placement, mixed precision, and a run on nccl (E1, E3)."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DistributedDataParallelKwargs
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.handlers import GradScalerKwargs
from tests.helpers import run_distributed
from tests.parity.cells import Cell
from tests.parity.running import run
from tests.parity.task import Task

pytestmark = pytest.mark.gpu
BACKENDS = (
    *("single", "fsdp_full_shard", "fsdp_cpu_offload", "tp"),
    *("zero0", "zero2", "zero3", "compile_single"),
)


def train(
    mixed_precision: str, fsdp: FullyShardedDataParallelPlugin | None = None, **ddp: object
) -> tuple[list[float], str, str]:
    """Return the losses of a fit, the model's type and where its batches were."""
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        fsdp_plugin=fsdp,
        kwargs_handlers=[DistributedDataParallelKwargs(**ddp), GradScalerKwargs(init_scale=256.0)],
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.02), DataLoader(data, 16)
    )
    losses = []
    for _ in range(10):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
    place = batch.device.type
    accelerator.end_training()
    return losses, type(model).__name__, place


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
def test_a_model_trains_on_the_device(mixed_precision: str) -> None:
    losses, _, place = train(mixed_precision)
    assert place == "cuda"
    assert losses[-1] < 0.3 * losses[0]


def test_an_overflow_skips_the_step() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model.weight.detach().clone()
    inputs = torch.full((2, 4), float("inf"), device=accelerator.device)
    accelerator.backward(model(inputs).sum())
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(before, model.weight)


def train_in_bf16() -> tuple[list[float], str, str]:
    return train("bf16")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_train_together() -> None:
    (first, kind, _), (second, _, _) = run_distributed(train_in_bf16, 2)
    assert kind == "DistributedDataParallel"
    assert first == second
    assert first[-1] < 0.3 * first[0]


def train_with_a_whole_layer() -> list[float]:
    return train("no", FullyShardedDataParallelPlugin(ignored_modules="0"))[0]


def test_the_default_optimizer_steps_sharded_and_whole_parameters() -> None:
    """torch chooses its kernels for many tensors at once by itself, on GPUs alone."""
    (losses,) = run_distributed(train_with_a_whole_layer, 1)
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_an_engine_on_the_device_is_the_plain_loop(backend: str, precision: str) -> None:
    task = Task(num_steps=6)
    verdict = run(Cell(backend, precision, 1, 2, task, device="cuda"))
    assert verdict.green, verdict.failures
    assert verdict.num_bytes["peak"] > 0
