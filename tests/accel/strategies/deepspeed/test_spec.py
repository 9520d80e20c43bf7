"""What a plugin of DeepSpeed implies for a run, and what a run decides in its configuration.

Holds E5, X1.
"""

from __future__ import annotations

from typing import Any

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.training import TorchDynamoPlugin
from accel.machine.env import Environment
from accel.strategies.deepspeed.spec import SPEC
from accel.strategies.spec import Request

(PLUGIN,) = SPEC.plugins
ONE = Environment()


def plugins(**fields: Any) -> dict[str, Any]:
    return {"deepspeed": PLUGIN.resolved(DeepSpeedPlugin(**fields), ONE)}


def request(given: dict[str, Any], mixed_precision: str = "no", backend: str = "no") -> Request:
    return Request(given, ONE, "cpu", mixed_precision, TorchDynamoPlugin(backend=backend))


def test_it_does_not_compute_in_fp8() -> None:
    (problem,) = SPEC.problems(request(plugins(), "fp8"))
    assert "fp8' under DeepSpeed" in problem.value
    assert "FullyShardedDataParallelPlugin()" in problem.remedy


def test_a_run_and_its_configuration_may_not_disagree() -> None:
    assert PLUGIN.adopt is not None
    config = {"train_batch_size": 3, "optimizer": {"type": "Adam"}}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    assert SPEC.problems(request({"deepspeed": {"default": plugin}})) == []
    adopted = PLUGIN.adopt(plugin, {"global_batch_size": (4, "4 by the run")})
    named = PLUGIN.resolved(adopted, ONE)
    first, second = SPEC.problems(request({"deepspeed": named}))
    assert "train_batch_size=3 with 4 by the run" in first.value
    assert "optimizer with optimizer=" in second.value


def test_a_file_is_recorded_by_its_content() -> None:
    assert PLUGIN.frozen_fields is not None
    config = {"train_batch_size": 3}
    found = PLUGIN.frozen_fields(DeepSpeedPlugin(hf_ds_config=config))
    assert found["hf_ds_config"]["train_batch_size"] == 3
    assert PLUGIN.frozen_fields(DeepSpeedPlugin()) == {}
