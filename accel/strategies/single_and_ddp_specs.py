"""Specs of the strategies of a run that switches no plugin on: one process, or DDP."""

from __future__ import annotations

from accel.config.handlers import DistributedDataParallelKwargs
from accel.strategies.spec import MemoryLayout, StrategySpec

SINGLE = StrategySpec(
    name="single",
    place="accel.strategies.single:SingleProcessStrategy",
    is_default=lambda world_size: world_size <= 1,
    handlers=(DistributedDataParallelKwargs,),
)
DDP = StrategySpec(
    name="ddp",
    place="accel.strategies.ddp:DDPStrategy",
    is_default=lambda world_size: world_size > 1,
    handlers=(DistributedDataParallelKwargs,),
    memory=(MemoryLayout("ddp"),),
)
