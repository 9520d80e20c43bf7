"""Who decides what in DeepSpeed's configuration: two owners of one value must agree."""

from __future__ import annotations

import math
from typing import Any

from accel.config.deepspeed import KEYS, DeepSpeedPlugin
from accel.config.deepspeed_json import AUTO, set_at, value_at
from accel.errors import Problem


class Claims:
    """DeepSpeed's configuration, with what the plugin's fields and the run decide in it.

    Args:
        plugin: the active plugin.

    Attributes:
        config: the nested dictionary.
        problems: what contradicts itself.

    Raises:
        ConfigError: if the configuration cannot be read.
    """

    def __init__(self, plugin: DeepSpeedPlugin) -> None:
        self.plugin = plugin
        self.config = plugin.given_config()
        self.problems: list[Problem] = []
        self._owners: dict[str, str] = {}
        for field, key in KEYS.items():
            value = getattr(plugin, field)
            if value is not None:
                self.claim(key, value, plugin.source(field))
        for key, (value, source) in plugin.decided.items():
            self.claim(key, value, source)

    def claim(self, key: str, value: Any, source: str) -> None:
        """Set `key`, or note that the configuration says something else than `source`."""
        found = value_at(self.config, key)
        if found in (None, AUTO):
            set_at(self.config, key, value)
            self._owners[key] = source
        elif not is_equal(found, value):
            owner, remedy = self._owners.get(key), f'Write "auto" for {key}, or make them equal.'
            first = owner or f"{self.plugin.place}: {key}={found!r}"
            self.note(
                f"{first} with {source}",
                "both decide it, and they disagree",
                "Make them equal, or leave one out." if owner else remedy,
            )

    def default(self, key: str, value: Any) -> None:
        """Set `key` where the configuration says nothing."""
        if value_at(self.config, key) in (None, AUTO):
            set_at(self.config, key, value)

    def note(self, value: str, rule: str, remedy: str) -> None:
        """Note something that is wrong."""
        self.problems.append(Problem(value, rule, remedy))


def is_equal(found: Any, value: Any) -> bool:
    """Return whether two values of a configuration mean the same."""
    numbers, sequences = (int, float), (list, tuple)
    if isinstance(found, sequences) and isinstance(value, sequences):
        return len(found) == len(value) and all(map(is_equal, found, value))
    if isinstance(found, numbers) and isinstance(value, numbers):
        return math.isclose(found, value, rel_tol=1e-9)
    return bool(str(found) == str(value))
