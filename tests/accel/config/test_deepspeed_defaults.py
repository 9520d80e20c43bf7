"""Values that DeepSpeed's plugin and its configuration show where nobody gave one."""

from __future__ import annotations

from accel.config.deepspeed_json import (
    PLACEHOLDERS,
    HfDeepSpeedConfig,
    placeholders,
    shown_fields,
    value_at,
    without_placeholders,
)


def test_an_outline_has_every_placeholder_and_is_valid() -> None:
    outline = placeholders()
    assert {key: value_at(outline, key) for key in PLACEHOLDERS} == PLACEHOLDERS
    assert HfDeepSpeedConfig(outline).config == outline
    assert without_placeholders(outline) == {"zero_optimization": {}}


def test_values_of_others_stay() -> None:
    own = {
        "train_batch_size": 8,
        "zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": None}},
    }
    kept = {"device": "cpu"}
    assert without_placeholders(own) == {**own, "zero_optimization": {"offload_param": kept}}
    assert own["zero_optimization"]["offload_param"]["nvme_path"] is None  # type: ignore[index]


def test_models_are_partitioned_while_they_are_built_under_stage_3() -> None:
    assert shown_fields({}, None)["zero3_init_flag"] is False
    assert shown_fields({}, 3)["zero3_init_flag"] is True
    assert shown_fields({"zero_optimization": {"stage": 3}}, None)["zero3_init_flag"] is True
    assert shown_fields({"zero_optimization": {"stage": 3}}, 0)["zero3_init_flag"] is False
