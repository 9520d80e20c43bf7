"""Open values of DeepSpeed's configuration, given by hand (E1, E5)."""

from __future__ import annotations

import pytest

from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.errors import ConfigError

AUTO_RATE = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}},
    "gradient_clipping": "auto",
}


def test_every_auto_value_is_filled() -> None:
    plugin = DeepSpeedPlugin(AUTO_RATE)
    values = {"optimizer.params.lr": 0.1, "gradient_clipping": 2.0, "optimizer.params.eps": 1e-8}
    plugin.deepspeed_config_process(**values)
    assert plugin.get_value("optimizer.params.lr") == 0.1
    assert plugin.get_value("gradient_clipping") == 2.0
    plugin.deepspeed_config_process("", None, None, True, **values)
    with pytest.raises(ConfigError, match=r"lr=0\.1 in the configuration, and 0\.2 is given"):
        plugin.deepspeed_config_process(**{**values, "optimizer.params.lr": 0.2})
    plugin.deepspeed_config_process(must_match=False, **{**values, "optimizer.params.lr": 0.2})
    mismatches: list[str] = []
    plugin.deepspeed_config_process(mismatches=mismatches, **{"optimizer.params.eps": 1.0})
    assert [line.partition("=")[0] for line in mismatches] == ["optimizer.params.eps"]


def test_a_section_of_the_configuration_is_filled() -> None:
    plugin = DeepSpeedPlugin(AUTO_RATE)
    section = plugin.deepspeed_config["optimizer"]["params"]
    plugin.deepspeed_config_process(
        "optimizer.params.", config=section, **{"optimizer.params.lr": 3}
    )
    assert section["lr"] == 3
    assert plugin.is_auto("gradient_clipping")


def test_one_value_is_filled_or_compared() -> None:
    plugin = DeepSpeedPlugin(AUTO_RATE)
    with pytest.raises(ConfigError, match='gradient_clipping="auto": its value is not given'):
        plugin.fill_match("gradient_clipping")
    plugin.fill_match("gradient_clipping", gradient_clipping=2.0)
    plugin.fill_match("gradient_clipping", gradient_clipping=2.0)
    with pytest.raises(ConfigError, match=r"3\.0 is given for it, too"):
        plugin.fill_match("gradient_clipping", gradient_clipping=3.0)
    plugin.fill_match("gradient_clipping", must_match=False, gradient_clipping=3.0)
    mismatches: list[str] = []
    plugin.fill_match("gradient_clipping", mismatches, gradient_clipping=3.0)
    assert len(mismatches) == 1


@pytest.mark.parametrize(
    ("config", "precision", "fp16", "bf16"),
    [
        ({}, "bf16", None, True),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "fp16", True, False),
        ({"bf16": {"enabled": "auto"}}, "no", None, False),
        ({"bf16": {"enabled": True}}, "no", None, True),
    ],
)
def test_a_precision_is_written_into_the_configuration(
    config: dict[str, object], precision: str, fp16: bool | None, bf16: bool | None
) -> None:
    plugin = DeepSpeedPlugin(config)
    plugin.set_mixed_precision(precision)
    assert (plugin.get_value("fp16.enabled"), plugin.get_value("bf16.enabled")) == (fp16, bf16)


def test_a_precision_against_the_configuration_is_refused() -> None:
    plugin = DeepSpeedPlugin({"fp16": {"enabled": True}})
    with pytest.raises(ConfigError, match="hf_ds_config enables fp16"):
        plugin.set_mixed_precision("bf16")
