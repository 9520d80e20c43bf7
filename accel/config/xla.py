"""The plugin of training through torch_xla.

Source: https://docs.pytorch.org/xla/release/r2.9/perf/fsdpv2.html
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.config.checks import check_types
from accel.machine.errors import Problems


@dataclass
class XlaPlugin:
    """How torch_xla spreads a model over the devices of the process.

    Args:
        shard_weights: whether each device holds a part of every parameter, of its gradient and of
            its optimizer state (SPMD FSDP): along the first dim that the devices divide; what has
            none is replicated. False: each device holds all of them.

    Raises:
        ConfigError: if a value is of another type.
    """

    shard_weights: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        check_types(self, problems)
        problems.raise_if()
