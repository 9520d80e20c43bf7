"""The spec of training through torch_xla. Free of torch."""

from __future__ import annotations

from accel.config.training import is_compiling
from accel.config.xla import XlaPlugin
from accel.machine.enums import DistributedType, PrecisionType
from accel.machine.errors import Problem
from accel.strategies.spec import PluginSpec, Request, StrategySpec

NAME = "xla"
FORMATS = (PrecisionType.NO, PrecisionType.BF16)


def _problems(request: Request) -> list[Problem]:
    found = []
    if request.device_type != NAME:
        rule = "it spreads a model over the devices of torch_xla"
        remedy = "Choose distributed=tpu, or Accelerator(device='xla'); or leave it out."
        found.append(Problem(f"XlaPlugin on {request.device_type}", rule, remedy))
    world_size = request.environment.world_size
    if world_size > 1:
        rule = "one process drives all devices of the machine, and there is one machine"
        remedy = "Start one process: accel launch --tpu train.py, or distributed=tpu."
        found.append(Problem(f"{world_size} processes on xla", rule, remedy))
    if request.mixed_precision not in FORMATS:
        rule = "torch_xla computes in fp32 or bf16"
        remedy = "Use mixed_precision='bf16'."
        found.append(Problem(f"mixed_precision={request.mixed_precision!r} on xla", rule, remedy))
    if is_compiling(request.dynamo):
        rule = "XLA compiles each step by itself"
        found.append(Problem("torch.compile on xla", rule, "Leave the dynamo backend out."))
    return found


SPEC = StrategySpec(
    name=NAME,
    place="accel.strategies.xla.strategy:XlaStrategy",
    plugins=(PluginSpec(name=NAME, kind=XlaPlugin, reported=DistributedType.XLA),),
    is_default=lambda world_size, device_type: device_type == NAME,
    reported=DistributedType.XLA,
    packages=("torch_xla",),
    problems=_problems,
)
