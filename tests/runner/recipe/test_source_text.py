"""Definitions that are read from source text, without an import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.recipe import source_text

MODULE = """
from .inner import deep as shallow
import os.path, json as plain

def once(a): ...

def twice(a): ...
def twice(b): ...

def changed(a): ...
changed.__signature__ = None

def wraps(function): return lambda: function

@wraps
def wrapped(a): ...

class Plain:
    def __init__(self, a): ...

class Below(Plain):
    def __init__(self, b): ...

class New:
    def __new__(cls, *a): ...
    def __init__(self, a): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "read_not_imported"
    folder.mkdir()
    (folder / "__init__.py").write_text(MODULE)
    (folder / "inner.py").write_text("def deep(x): ...\n")
    (folder / "names.py").write_text("def f(x): ...\nglobals()['f'] = 3\n")
    (folder / "broken.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder.name
    assert folder.name not in sys.modules
    source_text.read.cache_clear()


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("once", "a"),
        ("shallow", "x"),
        ("inner.deep", "x"),
        ("Plain", "a"),
        ("Below", "b"),
        ("wrapped", None),
        ("New", None),
    ],
)
def test_the_function_that_a_call_reaches(package: str, name: str, parameter: str | None) -> None:
    found = source_text.definition(f"{package}.{name}")
    assert found is not None
    function = source_text.called(*found)
    assert (None if function is None else function.args.args[-1].arg) == parameter


@pytest.mark.parametrize("name", ["twice", "changed", "missing", "names.f", "broken.f", "no.f"])
def test_what_is_not_certain_has_no_definition(package: str, name: str) -> None:
    assert source_text.definition(f"{package}.{name}") is None


def test_names_are_followed_to_where_they_come_from(package: str) -> None:
    module = source_text.read(package)
    assert module is not None
    assert module.top_level("plain") == "json"
    assert module.top_level("shallow") == f"{package}.inner.deep"
    assert module.top_level("os") == "os"
