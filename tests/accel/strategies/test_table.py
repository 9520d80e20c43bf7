"""The table of strategies: every spec loads without torch, and another package's is checked.

Holds E5, X1.
"""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from accel.machine.device import KINDS
from accel.machine.errors import ConfigError
from accel.machine.imports import is_available, load_attribute
from accel.strategies import table
from accel.strategies.base import Strategy
from accel.strategies.spec import PluginSpec
from tests.helpers import python

TORCH_FREE = """
import sys
from accel.strategies.table import specs
specs()
sys.exit("torch" in sys.modules)
"""
TAKEN = replace(table.DDP, plugins=(PluginSpec("fsdp", int, argument="fsdp_plugin"),))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    table.specs.cache_clear()


def listing(monkeypatch: pytest.MonkeyPatch, value: str) -> str:
    """Return the error of a table with an entry point of another package."""
    entry = EntryPoint("theirs", value, table.GROUP)
    monkeypatch.setattr(table, "entry_points", lambda group: [entry])
    table.specs.cache_clear()
    with pytest.raises(ConfigError) as caught:
        table.specs()
    return str(caught.value)


def test_every_spec_leads_to_a_strategy() -> None:
    for spec in table.specs():
        if spec.name == "xla" and not is_available("torch_xla"):
            continue
        found: Any = load_attribute(spec.place) if spec.place else Strategy
        assert callable(found), spec.name


def test_the_table_is_free_of_torch() -> None:
    assert subprocess.run(python("-c", TORCH_FREE), timeout=120).returncode == 0


def test_one_default_for_every_number_of_processes() -> None:
    for world_size in (0, 1, 2, 64):
        for kind in KINDS:
            assert sum(spec.is_default(world_size, kind) for spec in table.specs()) == 1, kind


def test_an_entry_point_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    text = listing(monkeypatch, "no_such_package.spec:SPEC")
    assert "entry point accel.strategies: theirs = no_such_package.spec:SPEC" in text
    assert "ModuleNotFoundError" in text
    text = listing(monkeypatch, f"{__name__}:TORCH_FREE")
    assert "it is a StrategySpec, not str" in text


def test_names_that_are_taken_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = listing(monkeypatch, f"{__name__}:TAKEN")
    for name in ("strategy 'ddp'", "plugin 'fsdp'", "argument of Accelerator 'fsdp_plugin'"):
        assert f"{name}: 2 strategies name it so" in text


def test_a_spec_is_pickled_by_its_name() -> None:
    for spec in table.specs():
        assert pickle.loads(pickle.dumps(spec)) is spec
    unknown = pickle.dumps(replace(table.DDP, name="dpp"))
    with pytest.raises(ConfigError, match=r"strategy='dpp'.*ddp"):
        pickle.loads(unknown)
