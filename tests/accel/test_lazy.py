"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel._lazy import attribute, names, public_names

STUB = """
from json import dumps as dumps
from json import not_there as not_there
from os import getcwd as getcwd
"""


@pytest.fixture
def package(tmp_path: Path) -> Iterator[types.ModuleType]:
    module = types.ModuleType("a_lazy_package")
    module.__file__ = str(tmp_path / "__init__.py")
    (tmp_path / "__init__.pyi").write_text(STUB)
    sys.modules[module.__name__] = module
    yield module
    public_names.cache_clear()
    del sys.modules[module.__name__]


def test_a_name_is_looked_up_once_and_kept(package: types.ModuleType) -> None:
    assert attribute(package.__name__, "dumps") is json.dumps
    assert attribute(package.__name__, "getcwd") is os.getcwd
    assert vars(package)["dumps"] is json.dumps
    assert "not_there" not in vars(package)


def test_the_stub_lists_the_public_names(package: types.ModuleType) -> None:
    assert attribute(package.__name__, "__all__") == ["dumps", "not_there", "getcwd"]
    assert {"dumps", "getcwd", "__file__"} <= set(names(package.__name__))


@pytest.mark.parametrize("name", ["unknown", "not_there"])
def test_a_name_that_is_not_there_is_an_attribute_error(
    name: str, package: types.ModuleType
) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        attribute(package.__name__, name)


@pytest.mark.parametrize("module", ["utils", "utils.dataclasses", "tracking", "state", "hooks"])
def test_a_documented_module_is_there_after_the_import_of_its_package(module: str) -> None:
    # In a process of its own: here, another test has imported the module by its path already.
    code = f"import accel, sys; assert accel.{module} is sys.modules['accel.{module}']"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", ["_lazy_", "unknown", "__wrapped__"])
def test_a_package_has_no_other_modules(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'accel' has no attribute '{name}'"):
        attribute("accel", name)
