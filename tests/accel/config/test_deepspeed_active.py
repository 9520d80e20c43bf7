"""The plugins of a run by name, one of which is active (E1, E5)."""

from __future__ import annotations

import pytest

from accel.config.deepspeed import (
    DeepSpeedPlugin,
    active,
    get_active_deepspeed_plugin,
    named,
    share_selection,
)
from accel.machine.errors import ConfigError


class State:
    def __init__(self, plugin: DeepSpeedPlugin | None) -> None:
        self.deepspeed_plugin = plugin


def test_one_of_them_is_active() -> None:
    plugins = {"first": DeepSpeedPlugin(), "second": DeepSpeedPlugin(zero_stage=3)}
    assert active(None) is None
    share_selection(list(plugins.values()))
    assert active(plugins) is plugins["first"]
    plugins["second"].select()
    assert active(plugins) is plugins["second"] is named(plugins, "second")
    with pytest.raises(ConfigError, match="thrid"):
        named(plugins, "thrid")


def test_the_active_one_of_a_state() -> None:
    plugin = DeepSpeedPlugin()
    assert get_active_deepspeed_plugin(State(plugin)) is plugin
    with pytest.raises(ConfigError, match="DeepSpeed is off"):
        get_active_deepspeed_plugin(State(None))
