"""Fields that show a default and count as not given (E1, E5)."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

from accel.config.checks import FieldDefaults


@dataclass
class Plugin(FieldDefaults):
    size: int | None = None
    name: str | None = None

    def __post_init__(self, _defaulted: Mapping[str, object] | None) -> None:
        self._hide_defaults(_defaulted)
        self._show_defaults({"size": 3, "name": "none"})


def test_a_field_that_nobody_gave_shows_its_default() -> None:
    plugin = Plugin()
    assert (plugin.size, plugin.name) == (3, "none")
    assert plugin.given_fields() == {"size": None, "name": None}
    assert Plugin(3).given("size") == 3
    assert [field.name for field in dataclasses.fields(plugin)] == ["size", "name"]
    assert next(iter(inspect.signature(Plugin).parameters)) == "size"  # positional calls as before


def test_copies_remember_what_was_given() -> None:
    plugin = Plugin(name="x")
    copies = (
        dataclasses.replace(plugin),
        copy.copy(plugin),
        copy.deepcopy(plugin),
        pickle.loads(pickle.dumps(plugin)),
    )
    for copied in copies:
        assert copied == plugin
        assert copied.given_fields() == {"size": None, "name": "x"}
    assert dataclasses.replace(plugin, size=4).given("size") == 4


def test_an_assignment_gives_a_field_of_this_object_alone() -> None:
    plugin = Plugin()
    copied = copy.copy(plugin)
    copied.size = 3
    assert (copied.given("size"), plugin.given("size")) == (3, None)


def test_given_fields_are_changed_exactly() -> None:
    assert Plugin(name="x").with_given(size=3).given_fields() == {"size": 3, "name": "x"}
