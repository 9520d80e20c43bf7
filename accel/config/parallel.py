"""The plugin of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from accel.config.handlers import check_minimum
from accel.errors import ConfigError, Problem


@dataclass
class TorchTensorParallelPlugin:
    """How matrices are split over the processes of a group.

    Args:
        tp_size: processes that share one replica of the model.
    """

    tp_size: int = 1

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        check_minimum(self, "tp_size", 1, problems)
        ConfigError.raise_if(problems)
