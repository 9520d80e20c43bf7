"""The plugins of a run by name, one of which is active (E1, E5)."""

from __future__ import annotations

import pytest

from accel.config.deepspeed import (
    DeepSpeedPlugin,
    get_active_deepspeed_plugin,
)
from accel.machine.errors import ConfigError


class State:
    def __init__(self, plugin: DeepSpeedPlugin | None) -> None:
        self.deepspeed_plugin = plugin


def test_the_active_one_of_a_state() -> None:
    plugin = DeepSpeedPlugin()
    assert get_active_deepspeed_plugin(State(plugin)) is plugin
    with pytest.raises(ConfigError, match="DeepSpeed is off"):
        get_active_deepspeed_plugin(State(None))
