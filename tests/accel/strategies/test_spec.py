"""Where a plugin is given, what fills it, and what a run with it is called (E5, X1)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from accel.strategies.spec import PluginSpec


@dataclass
class Rings:
    """A plugin.

    Args:
        size: of a ring.
    """

    size: int = 2


def test_a_plugin_is_as_given_or_has_its_defaults() -> None:
    spec, given = PluginSpec("rings", Rings), Rings(3)
    assert spec.resolved(given, Environment()) is given
    assert spec.resolved(None, Environment()) == Rings(2)
    with pytest.raises(ConfigError, match=r"strategy_plugins=3: it is a Rings\. Give"):
        spec.resolved(3, Environment())
    with pytest.raises(ConfigError, match="rings_plugin=3"):
        PluginSpec("rings", Rings, argument="rings_plugin").resolved(3, Environment())


def test_a_reader_gets_the_variables_of_its_prefixes() -> None:
    variables = {"RINGS_SIZE": "4", "RINGS_EMPTY": " ", "OTHER": "1", "RING": "2"}
    spec = PluginSpec("rings", Rings, prefixes=("RINGS_",), read=lambda given, found: found)
    assert spec.resolved(None, Environment(variables=variables)) == {"RINGS_SIZE": "4"}
    assert PluginSpec("rings", Rings).variables(Environment(variables=variables)) == {}
