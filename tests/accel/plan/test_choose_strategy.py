"""Which strategy arguments and environment choose, and which cannot be combined (E1, E5)."""

from __future__ import annotations

import pytest

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.handlers import AutocastKwargs, DistributedDataParallelKwargs
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import TorchDynamoPlugin
from accel.machine.enums import DistributedType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problems
from accel.plan.arguments import Arguments, choose
from accel.plan.plan import resolve
from accel.strategies.spec import Request
from accel.strategies.table import named

FOUR = Environment(
    rank=0, local_rank=0, world_size=4, local_world_size=4, master_addr="localhost", master_port=1
)


def chosen(environment: Environment = FOUR, **arguments: object) -> tuple[str, str]:
    """Return the strategy, and all that is wrong."""
    found = Problems()
    label = choose(Arguments.of(arguments), environment, "cpu", found).label
    return label, " ".join(str(problem) for problem in found)


def test_without_a_plugin_the_number_of_processes_decides() -> None:
    assert chosen() == ("ddp", "")
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
    plan = resolve(Arguments.of({"cpu": True, **arguments}), FOUR)
    assert plan.strategy == strategy
    assert plan.distributed_type == reported


def test_a_kind_of_device_may_have_a_strategy_of_its_own() -> None:
    found = Problems()
    assert choose(Arguments(), Environment(), "xla", found).label == "xla"
    assert not found
    plugin = FullyShardedDataParallelPlugin()
    choose(Arguments(strategy_plugins=[plugin]), Environment(), "xla", found)
    assert "fsdp on xla: models are distributed by xla there" in str(found[0])


def test_what_training_on_xla_cannot_do() -> None:
    request = Request({}, FOUR, "xla", "fp16", TorchDynamoPlugin(backend="inductor"))
    text = " ".join(map(str, named("xla").problems(request)))
    assert "4 processes on xla: one process drives all devices" in text
    assert "mixed_precision='fp16' on xla: torch_xla computes in fp32 or bf16" in text
    assert "torch.compile on xla" in text


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_a_launcher_switches_an_engine_on(name: str) -> None:
    variables = {f"ACCELERATE_USE_{name.upper()}": "yes"}
    assert chosen(Environment(variables=variables)) == (name, "")


def test_one_process_under_an_engine_has_a_group_of_its_own() -> None:
    arguments = Arguments(cpu=True, strategy_plugins=[FullyShardedDataParallelPlugin()])
    plan = resolve(arguments, Environment())
    assert (plan.strategy, plan.backend) == ("fsdp", "gloo")


def test_one_engine_spreads_a_model_but_for_pairs_that_share_it() -> None:
    sharded, split = FullyShardedDataParallelPlugin(), TorchTensorParallelPlugin(2)
    assert chosen(fsdp_plugin=sharded, torch_tp_plugin=split) == ("fsdp", "")
    _, text = chosen(fsdp_plugin=sharded, deepspeed_plugin=DeepSpeedPlugin())
    assert "fsdp with deepspeed: they cannot be combined" in text
    _, text = chosen(torch_tp_plugin=split, deepspeed_plugin=DeepSpeedPlugin())
    assert "tensor_parallel with deepspeed" in text


def test_a_handler_of_another_strategy_is_told_and_no_error() -> None:
    """Libraries pass it whatever the strategy is, as `transformers.Trainer` does."""
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=True),
        AutocastKwargs(enabled=False),  # which is read
    ]
    plugin = FullyShardedDataParallelPlugin()
    arguments = Arguments(cpu=True, strategy_plugins=[plugin], kwargs_handlers=handlers)
    (note,) = resolve(arguments, FOUR).notes
    assert note.startswith("DistributedDataParallelKwargs(find_unused_parameters=True) with fsdp")


def test_everything_wrong_is_told_at_once() -> None:
    plugins = {"a": DeepSpeedPlugin(), "b": object()}
    arguments = Arguments(
        cpu=True,
        plugins={"deepspeed_plugins": plugins, "torch_tp_plugin": TorchTensorParallelPlugin(3)},
        strategy_plugins=[3],
        mixed_precision="bf61",
    )
    with pytest.raises(ConfigError) as caught:
        resolve(arguments, FOUR)
    text = str(caught.value)
    assert "deepspeed_plugins['b']" in text
    assert "tp_size=3 with 4 processes" in text
    assert "tensor_parallel with deepspeed" in text
    assert "strategy_plugins: 3: each is one of FullyShardedDataParallelPlugin" in text
    assert "bf61" in text
