"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel._lazy import attribute, names, public_names
from tests.helpers import ROOT
from tests.test_architecture import FACADES

STUB = """
from a_lazy_package import a_module as a_module
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


def modules_in_stub(package: str) -> set[str]:
    """Return the modules that the stub of a package tells type checkers of."""
    stub = ROOT.joinpath(*package.split("."), "__init__.pyi")
    lines = ast.parse(stub.read_text()).body
    return {
        alias.name
        for line in lines
        if isinstance(line, ast.ImportFrom) and line.module == package
        for alias in line.names
    }


@pytest.mark.parametrize("package", ["accel", "accel.utils"])
def test_type_checkers_are_told_of_modules_that_are_there(package: str) -> None:
    facades = {name.rpartition(".")[2] for name in FACADES if name.rpartition(".")[0] == package}
    found = modules_in_stub(package)
    assert facades <= found
    assert found.isdisjoint(public_names(package))
    for name in found:
        module = getattr(importlib.import_module(package), name)
        assert module is sys.modules[f"{package}.{name}"]
    if package == "accel.utils":
        files = ROOT.joinpath("accel", "utils").glob("[a-z]*.py")
        assert found == {path.stem for path in files}


CHECKED = """
import accel
accel.utils.set_seed(0)
accel.utils.dataclasses.ProjectConfiguration(nothing=1)
accel.state.PartialState().num_processes
"""


@pytest.mark.slow  # minutes: the checker reads torch; the stubs' lines are compared above
def test_a_type_checker_knows_the_modules(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="the extra `check` installs it")
    (tmp_path / "script.py").write_text(CHECKED)
    command = (sys.executable, "-m", "mypy", "--config-file=", str(tmp_path / "script.py"))
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=tmp_path, env=environment
    )
    (mistake, count) = answer.stdout.splitlines()
    assert 'Unexpected keyword argument "nothing" for "ProjectConfiguration"' in mistake
    assert "Found 1 error" in count


@pytest.mark.parametrize("name", ["_lazy_", "unknown", "__wrapped__"])
def test_a_package_has_no_other_modules(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'accel' has no attribute '{name}'"):
        attribute("accel", name)
