"""Sizes of the parallel axes: what they are, what they switch on, and what they refuse (E1, E5)."""

from __future__ import annotations

from typing import Any

import pytest

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.parallelism import ParallelismConfig
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from accel.plan.arguments import Arguments
from accel.plan.dims import AXES
from accel.plan.plan import Plan, resolve
from tests.helpers import run_distributed


def world(size: int, **variables: str) -> Environment:
    """Return the environment of the last of so many processes on one node."""
    if size == 1:
        return Environment(use_cpu=True, variables=variables)
    index = size - 1
    return Environment(index, index, size, size, "localhost", 1, use_cpu=True, variables=variables)


def plan_of(size: int, config: ParallelismConfig | None, **plugins: object) -> Plan:
    return resolve(Arguments(parallelism_config=config, plugins=plugins), world(size))


def sizes(plan: Plan) -> dict[str, int]:
    """Return the axes of a plan that have a size above 1."""
    dims = plan.parallel_dims
    return {axis: dims.size(axis) for axis in AXES if dims.size(axis) > 1}


def test_sizes_and_what_follows_from_them() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=4)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (
        (24, 6, 4)
    )
    assert config.dp_replicate_enabled
    assert config.dp_shard_enabled
    assert config.tp_enabled
    assert not config.cp_enabled
    assert not config.sp_enabled
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp"]
    assert config.dp_dim_names == config.dp_cp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.to_json()["tp_size"] == 4
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")
    alone = ParallelismConfig()
    assert (alone.total_size, alone.active_mesh_dims, alone.fsdp_dim_names) == (1, [], ["dp_shard"])
    assert (alone.dp_replicate_enabled, alone.dp_shard_enabled, alone.tp_enabled) == (False,) * 3


@pytest.mark.parametrize(
    "option",
    [
        {"tp_handler": object()},
        {"cp_handler": object()},
        {"sp_handler": object()},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_is_not_built_yet_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        ParallelismConfig(**option)


def built_meshes() -> None:
    """The joined axes are those of the mesh of a configuration, and of a run."""
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    built = config.build_device_mesh("cpu")
    assert built is not None
    assert built.mesh_dim_names == ("dp_replicate", "dp_shard")
    for mesh in (built, accelerator.torch_device_mesh):
        sizes = {name: mesh[name].size() for name in ("dp", "dp_shard_cp", "dp_cp")}
        assert sizes == {"dp": 4, "dp_shard_cp": 2, "dp_cp": 4}
        assert mesh["dp"].get_local_rank() == accelerator.process_index
    accelerator.end_training()


def test_a_mesh_answers_to_joined_axes() -> None:
    assert ParallelismConfig().build_device_mesh("cpu") is None
    run_distributed(built_meshes, 4)


# -- what a run makes of them ------------------------------------------------------------------


def test_replicas_are_data_parallelism() -> None:
    plan = plan_of(2, ParallelismConfig(dp_replicate_size=2))
    assert (plan.strategy, sizes(plan)) == ("ddp", {"dp_replicate": 2})
    assert plan.parallelism == ParallelismConfig(dp_replicate_size=2)
    assert plan_of(2, None).parallelism is None


def test_shards_switch_fsdp_on() -> None:
    plan = plan_of(4, ParallelismConfig(dp_shard_size=2, dp_replicate_size=2))
    assert (plan.strategy, sizes(plan)) == ("fsdp", {"dp_replicate": 2, "dp_shard": 2})


def test_a_tensor_parallel_size_switches_that_on() -> None:
    plan = plan_of(4, ParallelismConfig(tp_size=2, dp_replicate_size=2))
    assert (plan.strategy, sizes(plan)) == ("tp", {"dp_replicate": 2, "tp": 2})
    plan = plan_of(4, ParallelismConfig(tp_size=2, dp_shard_size=2))
    assert (plan.strategy, sizes(plan)) == ("fsdp", {"dp_shard": 2, "tp": 2})


def test_ranks_of_a_sequence_shard_the_model() -> None:
    plan = plan_of(4, ParallelismConfig(cp_size=2, dp_replicate_size=2))
    assert (plan.strategy, sizes(plan)) == ("fsdp", {"dp_replicate": 2, "cp": 2})
    assert plan.parallel_dims.draw_leaders == (0, 1, 2, 3)
    plan = plan_of(
        4, ParallelismConfig(sp_size=2, dp_shard_size=2), deepspeed_plugin=DeepSpeedPlugin()
    )
    assert (plan.strategy, sizes(plan)) == ("deepspeed", {"dp_shard": 2, "cp": 2})
    with pytest.raises(ConfigError, match=r"cp_size=2, sp_size=2.*Give one of them"):
        ParallelismConfig(cp_size=2, sp_size=2)


def test_plugins_keep_what_else_they_say() -> None:
    fsdp = FullyShardedDataParallelPlugin(min_num_params=7)
    tp = TorchTensorParallelPlugin(tp_plan={"up": "colwise"})
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    plan = plan_of(4, config, fsdp_plugin=fsdp, torch_tp_plugin=tp)
    assert sizes(plan) == {"dp_shard": 2, "tp": 2}
    assert plan.plugin("fsdp").min_num_params == 7
    assert plan.plugin("tensor_parallel").tp_plan == {"up": "colwise"}
    assert fsdp.dp_replicate_size is None  # the caller's own is not changed


@pytest.mark.parametrize(
    ("config", "plugins", "words"),
    [
        (ParallelismConfig(dp_replicate_size=2), {}, "1 processes"),
        (ParallelismConfig(), {"size": 2}, "dp_replicate_size=1"),
        (ParallelismConfig(sp_size=2), {"size": 2}, "Give cp_size instead"),
        (
            ParallelismConfig(pp_size=2),
            {"size": 2, "deepspeed_plugin": DeepSpeedPlugin()},
            r"pp_size=2\).*one process on this axis. Leave it out",
        ),
        (
            ParallelismConfig(tp_size=2),
            {"size": 2, "torch_tp_plugin": TorchTensorParallelPlugin(tp_size=4)},
            "given in two places",
        ),
        (
            ParallelismConfig(dp_shard_size=2),
            {"size": 2, "fsdp_plugin": FullyShardedDataParallelPlugin(dp_replicate_size=2)},
            "given in two places",
        ),
    ],
)
def test_sizes_that_do_not_fit(
    config: ParallelismConfig, plugins: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_of(plugins.pop("size", 1), config, **plugins)


def test_the_environment_gives_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"DP_SHARD_SIZE": "2", "TP_SIZE": "2", "CP_BACKEND": "torch"}.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}", text)
    switched_on = world(4, ACCELERATE_USE_PARALLELISM_CONFIG="true")
    assert sizes(resolve(Arguments(), switched_on)) == {"dp_shard": 2, "tp": 2}
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "two")
    with pytest.raises(ConfigError, match="PARALLELISM_CONFIG_TP_SIZE='two'"):
        resolve(Arguments(), switched_on)
    switched_off = world(4, ACCELERATE_USE_PARALLELISM_CONFIG="false")
    assert resolve(Arguments(), switched_off).strategy == "ddp"
