"""A small problem and what builds a loop on it, for the tests of the loop."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from accel.checkpoint.directory import checkpoints
from runner.data.datasets import Data
from runner.recipe.batch_plan import plan_batches
from runner.recipe.processes import dp_size
from runner.recipe.schema import Checkpoint, DataLoader, Precision, Recipe, Tracker, Trainer
from runner.training.build import make_accelerator
from runner.training.console import Display
from runner.training.loop import Loop
from runner.training.run import Callback
from runner.training.step import Objective, SupervisedStep

NUM_TRAIN, NUM_VALIDATION = 40, 13


class Points(Dataset[Any]):
    """Points with a noise that is drawn anew each time, by three generators."""

    def __init__(self, size: int, noisy: bool = False, offset: int = 0) -> None:
        generator = torch.Generator().manual_seed(size + offset)
        self.x = torch.randn(size, 4, generator=generator)
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5, 3.0])
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        if self.noisy:
            x = x + 0.1 * torch.randn(4) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x, self.y[index]


class Stream(IterableDataset[Any]):
    """Points of unknown number."""

    def __init__(self, size: int) -> None:
        self.points = Points(size)

    def __iter__(self) -> Any:
        return (self.points[index] for index in range(len(self.points)))


class Fit(Objective):
    monitor = "loss"
    mode = "min"

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return (model(x).squeeze(-1) - y).square()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        torch.rand(3)  # an objective that draws at random must not change training
        return super().evaluate(model, batch)

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return {**super().summarize(values), "count": float(len(values["loss"]))}


class Scripted(Fit):
    """Its validation losses are given."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return {"loss": self.values.pop(0), "count": float(len(values["loss"]))}


class Exploding(Fit):
    """Its loss is not a number at the third call."""

    def __init__(self) -> None:
        self.calls = 0

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        losses = super().losses(model, batch)
        if model.training:
            self.calls += 1
            if self.calls == 3:
                losses = losses * math.nan
        return losses.clamp(max=10.0) if not torch.isnan(losses).any() else losses


class Spy(Callback):
    """Keeps what it was told, and draws at random each time."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.stop_at = stop_at
        self.calls = 0

    def tell(self, *event: Any) -> None:
        self.events.append(event)
        random.random()
        torch.rand(1)

    def on_start(self, loop: Loop) -> None:
        self.tell("start", loop.state.step)

    def on_step(self, loop: Loop) -> None:
        self.calls += 1
        if loop.state.step == self.stop_at:
            loop.stop("enough")

    def on_log(self, loop: Loop, values: Mapping[str, float]) -> None:
        self.tell("log", loop.state.step, values["loss"])

    def on_evaluate(self, loop: Loop, split: str, metrics: Mapping[str, float]) -> None:
        self.tell("evaluate", split, loop.state.step, metrics["count"])

    def on_checkpoint(self, loop: Loop, path: str) -> None:
        self.tell("checkpoint", loop.state.step)

    def on_end(self, loop: Loop) -> None:
        self.tell("end", loop.state.step)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state["calls"]

    def steps(self, kind: str) -> list[int]:
        return [event[2 if kind == "evaluate" else 1] for event in self.events if event[0] == kind]


def recipe_of(**changes: Any) -> Recipe:
    """Return a recipe of 8 samples a step, 5 steps an epoch; `trainer__epochs=2` sets a field.

    It has no short evaluation before the first step: objectives of tests count their calls.
    """
    nodes: dict[str, dict[str, Any]] = {
        "trainer": {"epochs": 4, "global_batch_size": 8, "log_every": 1, "sanity_steps": 0},
        "tracker": {"log_with": []},
        "dataloader": {},
        "checkpoint": {},
        "precision": {},
    }
    plain = {}
    for name, value in changes.items():
        node, _, field = name.partition("__")
        if field:
            nodes[node][field] = value
        else:
            plain[name] = value
    return Recipe(
        trainer=Trainer(**nodes["trainer"]),
        tracker=Tracker(**nodes["tracker"]),
        dataloader=DataLoader(**nodes["dataloader"]),
        checkpoint=Checkpoint(**nodes["checkpoint"]),
        precision=Precision(**nodes["precision"]),
        **plain,
    )


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def scheduler(optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=num_steps)


def plateau(optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def build(
    run_dir: Path,
    recipe: Recipe,
    *,
    data: Data | None = None,
    dropout: float = 0.0,
    objective: Objective | None = None,
    make_scheduler: Any = scheduler,
    model: nn.Module | None = None,
    make_optimizer: Any = optimizer,
    kind: type[SupervisedStep] = SupervisedStep,
    display: Display | None = None,
    **kwargs: Any,
) -> Loop:
    """Return a loop as a worker builds it."""
    forget()
    torch.manual_seed(7)
    run_dir.mkdir(parents=True, exist_ok=True)
    data = data or Data(Points(NUM_TRAIN), Points(NUM_VALIDATION), Points(9))
    size = None if isinstance(data.train, Stream) else len(data.train)  # type: ignore[arg-type]
    parts = dp_size(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    plan = plan_batches(recipe.trainer, parts, size)
    accelerator = make_accelerator(recipe, run_dir, plan)
    layers = (nn.Linear(4, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1))
    step = kind(
        model or nn.Sequential(*layers),
        objective or Fit(),
        make_optimizer,
        make_scheduler,
    )
    loop = Loop(recipe, run_dir, accelerator, step, data, **kwargs)
    loop.display = display or Display(enabled=False)
    return loop


def forget() -> None:
    """End an invocation: what follows is a new process, as far as the engine is concerned."""
    from tests.helpers import reset_accel

    reset_accel()


def run(run_dir: Path, recipe: Recipe, **kwargs: Any) -> dict[str, Any]:
    return build(run_dir, recipe, **kwargs).run()


def newest(run_dir: Path) -> Path:
    return checkpoints(run_dir / "checkpoints")[-1]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(newest(run_dir) / "model.safetensors")


def records(run_dir: Path, split: str = "train") -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == split]


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in records(run_dir)]
