"""The cells of the matrix: model × strategy × precision, and why some do not run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from tests.zoo.models import MODELS

PRECISIONS = ("no", "bf16")
BATCH_SIZE, NUM_STEPS = 8, 6
# Of Mixtral's own plan, what splits matrices; its experts are not modules that hold one each.
ATTENTION = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
TP_PLANS = {"mixtral": ATTENTION}


@dataclass(frozen=True)
class Cell:
    """One training run of the zoo.

    Args:
        model: key in `MODELS`.
        strategy: key in `STRATEGIES`.
        precision: no or bf16.
        folder: of this run's own files.
    """

    model: str
    strategy: str
    precision: str = "no"
    folder: str = ""

    @property
    def world_size(self) -> int:
        """Processes."""
        return STRATEGIES[self.strategy].world_size

    @property
    def name(self) -> str:
        """The cell in three words."""
        return f"{self.model} {self.strategy} {self.precision}"


@dataclass(frozen=True)
class StrategyEntry:
    """One way to distribute a model.

    Args:
        arguments: returns what `Accelerator` is given, by the key of the model.
        world_size: processes.
        holds_bf16: whether weights are bf16 in forward passes, and not only matrix products.
    """

    arguments: Callable[[str], dict[str, Any]]
    world_size: int = 2
    holds_bf16: bool = False


def _deepspeed(stage: int) -> StrategyEntry:
    def arguments(model: str) -> dict[str, Any]:
        return {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage)}

    return StrategyEntry(arguments, holds_bf16=True)


def _tensor_parallel(model: str) -> dict[str, Any]:
    plugin = TorchTensorParallelPlugin(tp_size=2, tp_plan=TP_PLANS.get(model))
    return {"torch_tp_plugin": plugin}


STRATEGIES: dict[str, StrategyEntry] = {
    "single": StrategyEntry(lambda model: {}, world_size=1),
    "ddp": StrategyEntry(lambda model: {}),
    "fsdp": StrategyEntry(
        lambda model: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        holds_bf16=True,
    ),
    "zero1": _deepspeed(1),
    "zero2": _deepspeed(2),
    "zero3": _deepspeed(3),
    "tp": StrategyEntry(_tensor_parallel),
}


def reason_not_to_run(cell: Cell) -> str | None:
    """Return why `cell` does not run; None if it does."""
    if cell.strategy == "tp" and not MODELS[cell.model].has_tp_plan:
        return "the model has no plan of tensor parallelism"
    return None


def matrix() -> Iterator[Cell]:
    """Yield every cell, run or not, in the order of the table."""
    for model, strategy, precision in itertools.product(MODELS, STRATEGIES, PRECISIONS):
        yield Cell(model, strategy, precision)
