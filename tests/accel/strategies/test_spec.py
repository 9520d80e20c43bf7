"""Where a plugin is given, what fills it, and what a run with it is called (E5, X1)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from accel.machine.env import Environment
from accel.machine.errors import ConfigError, NotBuiltError
from accel.strategies.spec import PluginSpec, StrategySpec, replicated, sharded


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


def test_a_plugin_without_a_class_is_not_built() -> None:
    with pytest.raises(NotBuiltError, match="later_plugin"):
        PluginSpec("later", None, argument="later_plugin").resolved(None, Environment())


def test_a_reader_gets_the_variables_of_its_prefixes() -> None:
    variables = {"RINGS_SIZE": "4", "RINGS_EMPTY": " ", "OTHER": "1", "RING": "2"}
    spec = PluginSpec("rings", Rings, prefixes=("RINGS_",), read=lambda given, found: found)
    assert spec.resolved(None, Environment(variables=variables)) == {"RINGS_SIZE": "4"}
    assert PluginSpec("rings", Rings).variables(Environment(variables=variables)) == {}


def test_a_strategy_is_named_by_its_first_plugin_that_is_on() -> None:
    first, second = PluginSpec("one", int, label="first"), PluginSpec("two", int)
    spec = StrategySpec("both", "", plugins=(first, second))
    assert spec.label({"one": 1, "two": 2}) == "first"
    assert spec.label({"two": 2}) == "two"
    assert spec.label({}) == "both"


def test_dimensions_replicate_or_shard_over_all_processes() -> None:
    three = Environment(world_size=3)
    assert (replicated({}, three).dp_replicate, replicated({}, three).dp_shard) == (3, 1)
    assert (sharded({}, three).dp_replicate, sharded({}, three).dp_shard) == (1, 3)
