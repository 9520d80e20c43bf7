"""What is imported before a fork."""

from __future__ import annotations

import importlib.util

from runner.factories.registry import register
from runner.launch import preload


def test_every_name_is_one_of_a_module() -> None:
    names = [*preload.RUN, *(name for names in preload.OF_FACTORIES.values() for name in names)]
    assert [name for name in names if importlib.util.find_spec(name) is None] == []


def test_factories_are_those_of_the_registry() -> None:
    known = {register.data.built_in(name) for name in register.data.names()}
    assert preload.OF_FACTORIES.keys() <= known
