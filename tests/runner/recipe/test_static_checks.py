"""Factories checked from source text: only what is certain is refused, and right use never is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from runner.recipe import paths, source_text, static_checks, trust
from runner.recipe.factory import check_factories
from runner.recipe.registry import register
from runner.recipe.schema import Recipe
from runner.training import build

# Each takes `width=3` and nothing else that is needed.
FACTORIES = """
from __future__ import annotations
import functools, sys
from abc import ABCMeta
import torch
from torch import nn
from cellar.casks import aged as old, Keg
from cellar.stars import *
from cellar import lazy

def takes_width(function):
    def inner(width):
        return function()
    return inner

def gives_depth(function):
    @functools.wraps(function)
    def inner(*arguments, width=1, **named):
        return function(*arguments, depth=width, **named)
    return inner

@takes_width
def decorated():
    return nn.Linear(1, 1)

@gives_depth
def wrapped(depth: str):
    return nn.Linear(1, 1)

def twice(depth):
    return nn.Linear(1, 1)

def twice(width):
    return nn.Linear(1, 1)

def branched(depth):
    return nn.Linear(1, 1)
try:
    import not_there
except ImportError:
    def branched(width):
        return nn.Linear(1, 1)

def replaced(depth):
    return nn.Linear(1, 1)
replaced = twice

def patched():
    return nn.Linear(1, 1)
patched = takes_width(patched)

def starred(depth):
    return nn.Linear(1, 1)
from cellar.stars import *

wide = functools.partial(old, depth=2)
short = lambda width: nn.Linear(1, 1)

class Meta(type):
    def __call__(cls, width):
        return nn.Linear(1, 1)

class Made(metaclass=Meta):
    def __init__(self, depth):
        pass

class Inherits(Made):
    def __init__(self, depth):
        pass

class New:
    def __new__(cls, width):
        return nn.Linear(1, 1)
    def __init__(self, depth):
        pass

def with_width(function):
    def inner(self, width):
        function(self)
    return inner

class Changed(nn.Linear):
    @with_width
    def __init__(self):
        super().__init__(1, 1)

class Rebound(nn.Linear):
    def __init__(self, depth):
        pass
    def _init(self, width):
        nn.Linear.__init__(self, 1, 1)
    __init__ = _init

class Callable:
    def __call__(self, width):
        return nn.Linear(1, 1)

instance = Callable()

def implicit(width: int = 3, depth: int = None):
    return nn.Linear(1, 1)

def dynamic(depth):
    return nn.Linear(1, 1)

def __getattr__(name):
    if name == "made":
        return short
    raise AttributeError(name)
"""
CASKS = """
from torch import nn
def aged(width, depth=1):
    return nn.Linear(1, 1)
class Keg(nn.Linear):
    def __init__(self, width):
        super().__init__(1, 1)
"""
STARS = """
from torch import nn
def starred(width):
    return nn.Linear(1, 1)
def only_starred(width):
    return nn.Linear(1, 1)
"""
DYNAMIC = """
from torch import nn
def other(width):
    return nn.Linear(1, 1)
def net(depth):
    return nn.Linear(1, 1)
globals()["net"] = other
"""
PLAIN = """
import torch
from functools import cache
from torch import nn

@cache
@torch.no_grad()
def net(width: int, depth: "int" = 1):
    return nn.Linear(1, 1)

class Base(nn.Module):
    pass

class Net(Base):
    def __init__(self, width: int):
        super().__init__()
"""
SHADOWED = """
from __future__ import annotations
from torch import nn
int = float
def net(width: int):
    return nn.Linear(1, 1)
"""
QUOTED = """
from __future__ import annotations
from typing import Optional
from torch import nn

def net(width: int, a: "Net" | None = None, b: Optional["a b"] = 1):
    return nn.Linear(1, 1)
"""
HANDED = """
from __future__ import annotations
import torch
from torch import nn

class Handed(nn.Module):
    def __init__(self, depth: int = 1):
        super().__init__()

def widened(kind):
    kind.__init__ = lambda self, width: nn.Module.__init__(self) or self.register_parameter(
        "weight", nn.Parameter(torch.zeros(width))
    )

widened(Handed)
"""
NAMES = (
    *(
        "decorated",
        "wrapped",
        "twice",
        "branched",
        "replaced",
        "patched",
        "starred",
        "only_starred",
    ),
    *(
        "old",
        "Keg",
        "wide",
        "short",
        "Made",
        "Inherits",
        "New",
        "Changed",
        "Rebound",
        "instance",
    ),
    *("implicit", "made", "lazy.net", "handed.Handed"),
)


@pytest.fixture
def cellar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cellar"
    folder.mkdir()
    modules = {"__init__": FACTORIES, "casks": CASKS, "stars": STARS, "lazy": DYNAMIC}
    for name, text in {
        **modules,
        "plain": PLAIN,
        "handed": HANDED,
        "shadowed": SHADOWED,
        "quoted": QUOTED,
    }.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv(trust.VARIABLE, "cellar")
    paths.move_project_last()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "cellar"]:
        del sys.modules[name]
    source_text.read.cache_clear()
    static_checks.signature_of.cache_clear()


def recipe(name: str, **arguments: object) -> Recipe:
    data, step = {"name": "digits"}, {"name": "supervised"}
    rest = {"objective": {"name": "classification"}, "optimizer": {"name": "adamw", "lr": 1e-3}}
    model = {"_target_": f"cellar.{name}", **arguments}
    return Recipe(step=step, model=model, data=data, **rest)  # type: ignore[arg-type]


def texts(problems: Iterable[object]) -> list[str]:
    return [str(problem) for problem in problems]


@pytest.mark.parametrize("name", NAMES)
def test_right_use_is_not_refused(name: str, cellar: Path) -> None:
    right = recipe(name, width=3)
    assert texts(static_checks.problems(right)) == []
    assert texts(check_factories(right)) == []
    assert build.build_step(right).models


def test_a_default_is_right_whatever_its_annotation_says(cellar: Path) -> None:
    right = recipe("implicit", depth=None)
    assert texts([*static_checks.problems(right), *check_factories(right)]) == []
    (only,) = check_factories(recipe("implicit", width=None))
    assert "model.width=None: it is of type int" in str(only)


def test_a_type_is_the_one_that_the_module_calls_so(cellar: Path) -> None:
    right = recipe("shadowed.net", width=0.5)
    assert texts([*static_checks.problems(right), *check_factories(right)]) == []


def test_an_annotation_that_is_no_type_says_nothing(cellar: Path) -> None:
    right = recipe("quoted.net", width=3, a=1, b="x")
    assert texts([*static_checks.problems(right), *check_factories(right)]) == []
    (only,) = static_checks.problems(recipe("quoted.net", width="wide"))
    assert "model.width='wide': it is of type int" in str(only)


@pytest.mark.parametrize("name", ["plain.net", "plain.Net"])
def test_what_is_certain_is_refused_without_an_import(name: str, cellar: Path) -> None:
    asked = recipe(name, width="wide", widht=3)
    told = "\n".join(texts(static_checks.problems(asked)))
    assert "model.widht=3" in told
    assert "model.width='wide': it is of type int" in told
    assert "cellar" not in sys.modules


def test_every_shipped_factory_is_told_by_its_text() -> None:
    for kind in ("model", "data", "objective", "step", "optimizer", "scheduler", "callback"):
        registry = getattr(register, kind)
        for name, place in registry._builtin.items():
            found = static_checks.signature_of(place.replace(":", "."))
            assert found is not None or name in ("next_byte", "classification"), name


def test_a_file_that_is_no_python_is_left_to_its_import(cellar: Path) -> None:
    (cellar / "plain.py").write_text("def net(width):\n")
    assert static_checks.problems(recipe("plain.net", widht=3)) == []
    (cellar / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# \xe4\n".encode("latin-1"))
    assert static_checks.problems(recipe("latin.net", widht=3)) == []


def test_a_decorated_factory_says_what_its_decorator_does_not_take(cellar: Path) -> None:
    assert "model.depth=2" in str(*check_factories(recipe("decorated", width=1, depth=2)))
    assert check_factories(recipe("wrapped")) == []
