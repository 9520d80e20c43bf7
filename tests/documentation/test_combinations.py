"""The table of what combines with what says what the engine refuses (E5)."""

from __future__ import annotations

from typing import Any

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.parallelism import ParallelismConfig
from accel.config.training import TorchDynamoPlugin
from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from accel.plan.arguments import Arguments
from accel.plan.plan import resolve
from tests.helpers import ROOT

FOUR = Environment(
    rank=0,
    local_rank=0,
    world_size=4,
    local_world_size=4,
    master_addr="localhost",
    master_port=1,
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "none (DDP)": {},
    "`fsdp=`": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "`deepspeed=`": {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)},
}
AXES = ("tp_size", "cp_size", "sp_size", "pp_size")


def _sizes(strategy: str, axes: tuple[str, ...]) -> dict[str, Any]:
    data = "dp_replicate_size" if strategy.startswith("none") else "dp_shard_size"
    sizes = {data: 4 // 2 ** len(axes), **dict.fromkeys(axes, 2)}
    return {"parallelism_config": ParallelismConfig(**sizes)}


def _combines(arguments: dict[str, Any]) -> str:
    try:
        resolve(Arguments.of({"device": "cpu", **arguments}), FOUR)
    except ConfigError:
        return "no"
    return "yes"


def table() -> str:
    """Return the table: each strategy beside each axis, pairs of axes, compilation and fp8."""
    columns: dict[str, Any] = {f"`{axis}`": (axis,) for axis in AXES}
    for first, second in (("tp", "cp"), ("tp", "pp"), ("cp", "pp")):
        columns[f"`{first}` × `{second}`"] = (f"{first}_size", f"{second}_size")
    lines = [
        f"| | {' | '.join(columns)} | `compile=` | fp8 |",
        f"|---{'|---' * (len(columns) + 2)}|",
    ]
    for name, plugins in STRATEGIES.items():
        found = [_combines({**plugins, **_sizes(name, axes)}) for axes in columns.values()]
        found.append(_combines({**plugins, "dynamo_plugin": TorchDynamoPlugin(backend="inductor")}))
        found.append(_combines({**plugins, "mixed_precision": "fp8"}))
        lines.append(f"| {name} | {' | '.join(found)} |")
    return "\n".join(lines)


def test_the_table_of_combinations_is_that_of_the_refusals() -> None:
    assert table() in (ROOT / "docs" / "distributed.md").read_text(), table()
