"""Which engine spreads the model: the arguments, the environment, and what does not go together."""

from __future__ import annotations

import pytest

from accel.arguments import Arguments
from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.parallel import TorchTensorParallelPlugin
from accel.engines import Findings, choose
from accel.enums import DistributedType
from accel.env import Environment
from accel.errors import ConfigError
from accel.plan import resolve

FOUR = Environment(
    rank=0, local_rank=0, world_size=4, local_world_size=4, master_addr="localhost", master_port=1
)


def chosen(environment: Environment = FOUR, **arguments: object) -> tuple[str | None, str]:
    """Return the strategy, and all that is wrong."""
    found = Findings()
    engines = choose(Arguments(**arguments), environment, found)  # type: ignore[arg-type]
    return engines.strategy, " ".join(str(problem) for problem in found.wrong)


def test_no_engine_leaves_the_strategy_to_the_number_of_processes() -> None:
    assert chosen() == (None, "")
    assert resolve(Arguments(cpu=True), FOUR).strategy == "ddp"
    assert resolve(Arguments(cpu=True), Environment()).strategy == "single"


@pytest.mark.parametrize(
    ("arguments", "strategy", "reported"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, "fsdp", DistributedType.FSDP),
        ({"torch_tp_plugin": TorchTensorParallelPlugin(2)}, "tp", DistributedType.TP),
        ({"deepspeed_plugin": DeepSpeedPlugin()}, "deepspeed", DistributedType.DEEPSPEED),
        ({"deepspeed_plugins": DeepSpeedPlugin()}, "deepspeed", DistributedType.DEEPSPEED),
    ],
)
def test_a_plugin_switches_its_engine_on(
    arguments: dict[str, object], strategy: str, reported: DistributedType
) -> None:
    plan = resolve(Arguments(cpu=True, **arguments), FOUR)  # type: ignore[arg-type]
    assert plan.strategy == strategy
    assert plan.distributed_type == reported


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_a_launcher_switches_an_engine_on(name: str) -> None:
    assert chosen(Environment(engines=(name,))) == (name, "")


def test_one_process_under_an_engine_has_a_group_of_its_own() -> None:
    plan = resolve(Arguments(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()), Environment())
    assert (plan.strategy, plan.backend) == ("fsdp", "gloo")


def test_one_engine_spreads_a_model_but_for_pairs_that_share_it() -> None:
    sharded, split = FullyShardedDataParallelPlugin(), TorchTensorParallelPlugin(2)
    assert chosen(fsdp_plugin=sharded, torch_tp_plugin=split) == ("fsdp", "")
    _, text = chosen(fsdp_plugin=sharded, deepspeed_plugin=DeepSpeedPlugin())
    assert "fsdp with deepspeed: one engine spreads a model" in text
    _, text = chosen(torch_tp_plugin=split, deepspeed_plugin=DeepSpeedPlugin())
    assert "deepspeed with tp" in text


def test_everything_wrong_is_told_at_once() -> None:
    plugins = {"a": DeepSpeedPlugin(), "b": object()}
    arguments = Arguments(
        cpu=True,
        deepspeed_plugins=plugins,
        torch_tp_plugin=TorchTensorParallelPlugin(3),
        mixed_precision="bf61",
    )
    with pytest.raises(ConfigError) as caught:
        resolve(arguments, FOUR)
    text = str(caught.value)
    assert "deepspeed_plugins['b']" in text
    assert "tp_size=3 with 4 processes" in text
    assert "bf61" in text
