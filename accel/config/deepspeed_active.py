"""The plugins of a run by name, one of which is active."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.errors import ConfigError, unknown_choice


class HasPlugins(Protocol):
    """A state of a run, as `AcceleratorState`."""

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """DeepSpeed's active plugin; None where it is off."""


def active(plugins: Mapping[str, DeepSpeedPlugin] | None) -> DeepSpeedPlugin | None:
    """Return the plugin that is selected; None where none is, or DeepSpeed is off."""
    return next((plugin for plugin in (plugins or {}).values() if plugin.selected), None)


def named(plugins: Mapping[str, DeepSpeedPlugin] | None, name: str) -> DeepSpeedPlugin:
    """Return the plugin called `name`, or raise `ConfigError`."""
    if plugins is None or name not in plugins:
        raise ConfigError(unknown_choice("DeepSpeed plugin", name, plugins or {}))
    return plugins[name]


def get_active_deepspeed_plugin(state: HasPlugins) -> DeepSpeedPlugin:
    """Return DeepSpeed's active plugin, which the next `prepare` follows.

    Args:
        state: of a run under DeepSpeed.

    Raises:
        ConfigError: if DeepSpeed is off.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ConfigError.of(
            "get_active_deepspeed_plugin",
            "DeepSpeed is off",
            "Switch it on with Accelerator(deepspeed_plugin=…).",
        )
    return plugin
