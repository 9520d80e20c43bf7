"""Megatron's plugin: its documented fields, variables and refusals (E1, E5)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest.mock import patch

import pytest

from accel.commands import launch_config
from accel.config.megatron import REFUSED, MegatronLMPlugin
from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from accel.plan.arguments import Arguments
from accel.plan.plan import Plan, resolve
from accel.strategies.megatron.spec import SPEC


def plan_of(size: int, rank: int = 0, **fields: object) -> Plan:
    with patch("accel.strategies.megatron.spec.DEVICE", "cpu"):
        return _plan_of(size, rank, **fields)


def _plan_of(size: int, rank: int = 0, **fields: object) -> Plan:
    environment = Environment(rank, rank, size, size, "localhost", 1, use_cpu=True)
    plugin = MegatronLMPlugin(**fields)  # type: ignore[arg-type]
    return resolve(Arguments(plugins={"megatron_lm_plugin": plugin}), environment)


def test_environment_variables_fill_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "4")
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "2")
    monkeypatch.setenv("MEGATRON_LM_GRADIENT_CLIPPING", "0.5")
    monkeypatch.setenv("MEGATRON_LM_SEQUENCE_PARALLELISM", "yes")
    plugin = MegatronLMPlugin(pp_degree=1)
    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches) == (4, 1, 1)
    assert (plugin.gradient_clipping, plugin.sequence_parallelism) == (0.5, True)


def test_each_variable_without_meaning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "two")
    monkeypatch.setenv("MEGATRON_LM_SEQUENCE_PARALLELISM", "perhaps")
    with pytest.raises(ConfigError, match="TP_DEGREE='two'") as refused:
        MegatronLMPlugin()
    assert "SEQUENCE_PARALLELISM='perhaps' (environment): expected true" in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tp_degree": 0}, "tp_degree=0"),
        ({"recompute_granularity": "some"}, "recompute_granularity"),
        ({"recompute_method": "some"}, "recompute_method"),
        ({"sequence_parallelism": True}, "divides sequences over tensor-parallel ranks"),
        ({"custom_model_provider_function": "no.such"}, "custom_model_provider_function"),
        ({"custom_model_provider_function": print, "hidden_dropout": 0.5}, "with a provider"),
        ({"recompute_num_layers": -3}, "recompute_num_layers=-3"),
        ({"other_megatron_args": [1]}, "it maps fields of TransformerConfig"),
    ],
)
def test_values_of_the_plugin_are_checked(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        MegatronLMPlugin(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for names in REFUSED.values() for name in names.split()])
def test_what_is_not_built_is_refused_by_name(name: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(MegatronLMPlugin)}
    kinds = {name: str(field.type) for name, field in fields.items()}
    assert getattr(MegatronLMPlugin(), name) == fields[name].default
    with pytest.raises(ConfigError, match=rf"MegatronLMPlugin\.{name}="):
        MegatronLMPlugin(**{name: True if "bool" in kinds[name] else 7})  # type: ignore[arg-type]


def test_variables_of_what_is_not_built_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_NO_LOAD_OPTIM", "true")
    with pytest.raises(ConfigError, match=r"MEGATRON_LM_NO_LOAD_OPTIM \(environment\)"):
        MegatronLMPlugin()


def test_ranks_are_laid_out_as_megatron_does() -> None:
    plan = plan_of(8, rank=5, tp_degree=2, pp_degree=2)
    assert plan.parallel_dims.coordinates == {
        **{"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    }
    assert [plan.parallel_dims.dp_rank_of(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert plan_of(4, use_distributed_optimizer=True).parallel_dims.dp_shard == 4
    with pytest.raises(ConfigError, match="each replica of the model takes 4 processes"):
        plan_of(6, tp_degree=2, pp_degree=2)


def test_micro_batches_are_accumulated() -> None:
    assert plan_of(1, num_micro_batches=3).accumulation.num_steps == 3
    (spec,) = SPEC.plugins
    assert spec.adopt is not None
    decided = {"accumulation_steps": (4, "trainer")}
    assert spec.adopt(MegatronLMPlugin(), decided).num_micro_batches == 4  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"trainer=4 with MegatronLMPlugin\.num_micro_batches=3"):
        spec.adopt(MegatronLMPlugin(num_micro_batches=3), decided)


def test_the_global_batch_counts_data_parallel_ranks_and_micro_batches() -> None:
    plugin = MegatronLMPlugin(
        num_micro_batches=2, seq_length=8, is_train_batch_min=False, attention_softmax_in_fp32=True
    )
    assert (plugin.seq_length, plugin.attention_softmax_in_fp32) == (8, True)
    assert plugin.is_train_batch_min is False
    plugin.set_training_args(micro_batch_size=4, dp_degree=3)
    assert (plugin.micro_batch_size, plugin.global_batch_size) == (4, 24)


def test_a_machine_without_gpus_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="megatron-core computes on CUDA GPUs"):
        _plan_of(1)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.strategies.megatron.spec.is_available", lambda package: False)
    with pytest.raises(ConfigError, match=r"pip install 'accel-runner\[megatron\]'"):
        plan_of(1)


def test_settings_of_the_launcher_reach_the_plugin(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "distributed_type: MEGATRON_LM\nnum_processes: 4\n"
        "megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_sequence_parallelism: true}\n"
    )
    found = launch_config.read(file)
    assert found["use_megatron_lm"] is True
    assert found["megatron_lm_tp_degree"] == 2
