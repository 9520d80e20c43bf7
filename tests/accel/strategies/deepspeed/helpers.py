"""Models, data and loops of the tests of DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.env import Environment
from accel.plan.arguments import Arguments
from accel.plan.dims import data_parallel
from accel.plan.plan import Plan, resolve
from accel.strategies.deepspeed.settings import Settings

STEPS = 10
GLOBAL_BATCH = 8
RATE, DECAY = 0.003, 0.1


def build() -> torch.nn.Module:
    """A model whose parameters do not divide by the number of processes."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)
    )


def data(batch_size: int, steps: int = STEPS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(steps * GLOBAL_BATCH, 5, generator=generator)
    targets = torch.randn(steps * GLOBAL_BATCH, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    dims = {p: len(getattr(p, "ds_shape", p.shape)) for p in model.parameters()}
    decayed = [p for p, dim in dims.items() if dim > 1]
    others = [p for p, dim in dims.items() if dim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)


def error_of(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(prediction.float(), target.float())


def plain(clip: float | None = None, halve_every: int = STEPS + 1) -> Any:
    """Losses, weights and last rate of a loop of torch alone over the global batches."""
    model = build()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, halve_every, 0.5)
    losses = []
    for inputs, targets in data(GLOBAL_BATCH):
        loss = error_of(model(inputs), targets)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict(), scheduler.get_last_lr()[0]


def largest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max((found[n].float() - expected[n].float()).abs().max().item() for n in expected)


def own(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a global batch."""
    return tensor[accelerator.process_index :: accelerator.num_processes]


def started(precision: str = "no", **fields: Any) -> tuple[Any, ...]:
    """Accelerator, model and SGD under a plugin with these fields."""
    plugin = DeepSpeedPlugin(**fields)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision=precision)
    model = build()
    return (accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def started_with_schedule(plugin: DeepSpeedPlugin | None, **options: Any) -> tuple[Any, ...]:
    """An accelerator with model, optimizer, scheduler and loader of ten steps."""
    split = DataLoaderConfiguration(split_batches=True)  # one step of the schedule for each step
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, dataloader_config=split, **options)
    model = build()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = data(GLOBAL_BATCH)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))


def train(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any, batches: Any
) -> list[float]:
    losses = []
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            loss = error_of(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def plan_of(plugin: DeepSpeedPlugin, **arguments: Any) -> Plan:
    given = {"cpu": True, "deepspeed_plugin": plugin, **arguments}
    return resolve(Arguments.of(given), Environment.read())


def completed(
    plugin: DeepSpeedPlugin,
    sizes: list[int] | None = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    replicas: int = 2,
    **arguments: Any,
) -> dict[str, Any]:
    plan = replace(plan_of(plugin, **arguments), parallel_dims=data_parallel(replicas, 0))
    settings = Settings(plugin, plan)
    settings.resolve_run(sizes or [4])
    settings.resolve_optimizer(optimizer, "cpu")
    settings.resolve_scheduler(scheduler, optimizer)
    settings.resolve_model(model or torch.nn.Linear(6, 5))
    return settings.finish()
