"""Values of DeepSpeed's configuration that are given in several places, which must agree."""

from __future__ import annotations

import math

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.deepspeed_defaults import KEYS
from accel.config.deepspeed_json import AUTO, set_at, value_at
from accel.machine.errors import Problems


class Claims:
    """Merge DeepSpeed's configuration with the plugin's fields and the values of the run.

    `problems` takes values that are given twice and differ. Raises `ConfigError` if the
    configuration cannot be read.
    """

    def __init__(self, plugin: DeepSpeedPlugin) -> None:
        self.plugin = plugin
        self.config = plugin.stated_config()
        self.problems = Problems()
        self._owners: dict[str, str] = {}
        for field, key in KEYS.items():
            value = plugin.given(field)
            if value is not None:
                self.claim(key, value, plugin.source(field))
        for key, (value, source) in plugin.decided.items():
            self.claim(key, value, source)

    def claim(self, key: str, value: object, source: str) -> None:
        """Set `key`, or note that the configuration has another value than `source`."""
        found = value_at(self.config, key)
        if found in (None, AUTO):
            set_at(self.config, key, value)
            self._owners[key] = source
        elif not is_equal(found, value):
            owner = self._owners.get(key) or self.plugin.filled_by(key)
            remedy = f'Write "auto" for {key}, or make them equal.'
            first = owner or f"{self.plugin.place}: {key}={found!r}"
            self.problems.add(
                f"{first} with {source}",
                "given in two places with different values",
                "Make them equal, or remove one." if owner else remedy,
            )

    def default(self, key: str, value: object) -> None:
        """Set `key` where the configuration has no value."""
        if value_at(self.config, key) in (None, AUTO):
            set_at(self.config, key, value)


def is_equal(found: object, value: object) -> bool:
    """Return whether two values of a configuration are equal, up to rounding."""
    if isinstance(found, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(found) == len(value) and all(map(is_equal, found, value))
    if isinstance(found, (int, float)) and isinstance(value, (int, float)):
        return math.isclose(found, value, rel_tol=1e-9)
    return bool(str(found) == str(value))
