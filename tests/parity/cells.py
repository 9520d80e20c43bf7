"""The cells of the matrix: backend × precision × processes × accumulation, and why some do not run.

An engine's own arguments are built here, so that a worker needs to know none of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.parity.task import Task

PRECISIONS = ("no", "bf16", "fp16")
WORLD_SIZES = (1, 2, 4)
ACCUMULATIONS = (1, 2)


@dataclass(frozen=True)
class Cell:
    """One training run of the matrix.

    Args:
        backend: key in `BACKENDS`.
        precision: no, bf16 or fp16.
        world_size: processes.
        accumulation: micro-batches of an optimizer step.
        task: what is trained.
        variant: what else is special, in a word.
        sabotage: what a control does wrong; None: nothing.
        device: "cpu" or "cuda".
    """

    backend: str
    precision: str = "no"
    world_size: int = 1
    accumulation: int = 1
    task: Task = field(default_factory=Task)
    variant: str = ""
    sabotage: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Backend:
    """One way to spread a model.

    Args:
        label: what the table shows.
        arguments: returns what `Accelerator` is given beside precision and accumulation.
        owns_bf16: whether the engine keeps a bf16 copy of the weights itself; else autocast.
        sharded: whether parameters, gradients and optimizer state are all spread over processes.
        reason: returns why a cell does not run; None if it does.
    """

    label: str
    arguments: Callable[[Cell], dict[str, Any]] = lambda cell: {}
    owns_bf16: bool = False
    sharded: bool = False
    reason: Callable[[Cell], str | None] = lambda cell: None


def _single(cell: Cell) -> str | None:
    return None if cell.world_size == 1 else "one process alone; `ddp` is the same on several"


def _ddp(cell: Cell) -> str | None:
    return "DDP on one process is `single`" if cell.world_size == 1 else None


BACKENDS: dict[str, Backend] = {
    "single": Backend("one process", reason=_single),
    "ddp": Backend("DDP", reason=_ddp),
}


def reason_not_to_run(cell: Cell, num_gpus: int) -> str | None:
    """Return why this machine does not run `cell`; None if it does."""
    if cell.device == "cuda" and cell.world_size > num_gpus:
        return f"{cell.world_size} processes want as many GPUs; there are {num_gpus}"
    return BACKENDS[cell.backend].reason(cell)


def matrix(task: Task, device: str) -> Iterator[Cell]:
    """Yield every cell, run or not, in the order of the table."""
    for backend, precision, world_size, accumulation in itertools.product(
        BACKENDS, PRECISIONS, WORLD_SIZES, ACCUMULATIONS
    ):
        yield Cell(backend, precision, world_size, accumulation, task, device=device)
        if precision == "no" and accumulation == 2:
            for variant in ("ragged", "short"):
                special = replace(task, **{variant: True})
                yield Cell(
                    backend, precision, world_size, accumulation, special, variant, device=device
                )
