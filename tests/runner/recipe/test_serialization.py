"""Recipes as plain values and as YAML, and back (C2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.enums import DDPCommunicationHookType
from accel.machine.errors import ConfigError
from runner.recipe import serialization
from runner.recipe.schema import Recipe
from runner.runs.job import Job
from tests.runner.recipe.test_schema import problems


def test_a_bare_no_in_yaml_is_no_precision() -> None:
    assert serialization.from_plain({"precision": {"mode": False}}).precision.mode == "no"


def test_what_deepspeeds_file_says_is_frozen(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}')
    Job(tmp_path).save(Recipe(deepspeed=DeepSpeedPlugin(hf_ds_config=str(file))))
    file.unlink()
    _, frozen = Job.load(tmp_path)
    assert frozen.deepspeed is not None
    assert frozen.deepspeed.stage == 1
    assert frozen.deepspeed.is_auto("gradient_clipping")


def test_a_distrusted_callable_is_not_imported() -> None:
    (only,) = problems({"profile": {"on_trace_ready": "antigravity.geohash"}})
    assert "profile.on_trace_ready=antigravity.geohash" in only
    recipe = {"module_filter_func": "antigravity.geohash"}
    (only,) = problems({"precision": {"mode": "fp8", "fp8_torchao": recipe}})
    assert "precision.fp8_torchao.module_filter_func=antigravity.geohash" in only


def test_plain_and_back_is_the_same_recipe() -> None:
    changed = serialization.from_plain(
        {
            "distributed": {
                "ddp": {"comm_hook": "fp16", "comm_state_option": {"a": [1, 2.5]}},
                "init": {"timeout": 600},
            },
            "model": {"name": "cnn", "nested": {"x": None, "y": ["no", True, 1e-5]}},
            "profile": {"schedule_option": {"wait": 1, "active": 1}},
            "trainer": {"max_time": "00:10:00"},
        }
    )
    plain = serialization.to_plain(changed)
    assert plain["distributed"]["ddp"]["comm_hook"] == "fp16"
    assert plain["distributed"]["init"]["timeout"] == 600.0
    assert serialization.from_plain(plain) == changed
    assert changed.distributed.ddp.comm_hook is DDPCommunicationHookType.FP16


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**31), 2**31),
    st.floats(allow_nan=False),
    st.sampled_from(["no", "on", "1e-5", "0x10", "null", "~", "1:30", "", " a: b", "é", "- x"]),
)


ARGUMENTS = st.dictionaries(
    st.sampled_from(["width", "lr", "on", "betas"]),
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)


@settings(max_examples=25)
@given(ARGUMENTS)
def test_yaml_and_back_is_the_same_recipe(arguments: dict[str, Any]) -> None:
    import tempfile

    changed = serialization.from_plain(
        {"model": {"name": "cnn", **arguments}, "precision": {"mode": "no"}}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(serialization.yaml_text(serialization.to_plain(changed)))
        assert serialization.from_plain(serialization.parse_yaml(path.read_text(), path)) == changed


def test_what_nobody_gave_a_plugin_is_frozen_as_not_given() -> None:
    recipe = serialization.from_plain({"fsdp": {"reshard_after_forward": False}})
    assert recipe.fsdp is not None
    assert recipe.fsdp.state_dict_type.name == "FULL_STATE_DICT"
    plain = serialization.to_plain(recipe.fsdp)
    assert (plain["reshard_after_forward"], plain["state_dict_type"]) == (False, None)
    text = serialization.yaml_text(serialization.frozen_plain(recipe))
    again = serialization.from_plain(serialization.parse_yaml(text, Path("config.yaml")))
    assert again.fsdp is not None
    assert again.fsdp.given_fields() == recipe.fsdp.given_fields()
    plain = serialization.to_plain(DeepSpeedPlugin(zero_stage=1))
    assert {name: value for name, value in plain.items() if value is not None} == {
        "zero_stage": 1,
        "is_train_batch_min": True,
    }


@pytest.mark.parametrize("text", ["null", "", "3", "[]", "trainer: {epochs: many}"])
def test_another_file_is_no_recipe_of_a_run(text: str) -> None:
    with pytest.raises(ConfigError, match="x: it is not the recipe of a run"):
        serialization.parse_yaml(text, Path("x"))
