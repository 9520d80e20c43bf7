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
        alike = set(public_names(package))  # `accel.utils.tqdm` is the function
        assert found == {path.stem for path in files} - alike


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


def test_a_name_keeps_its_value_where_a_module_is_called_alike() -> None:
    importlib.import_module("accel.utils.tqdm")
    alike = importlib.import_module("accel.utils")
    assert alike.tqdm is importlib.import_module("accel.run.progress").tqdm
    assert sys.modules["accel.utils.tqdm"].tqdm is alike.tqdm


@pytest.mark.parametrize(
    ("path", "name", "home"),
    [
        ("accel.memory_utils", "find_executable_batch_size", "accel.machine.memory"),
        ("accel.utils", "is_torch_tensor", "accel.utils.operations"),
        ("accel.utils.operations", "ConvertOutputsToFp32", "accel.comm.ops"),
        ("accel.utils.other", "write_basic_config", "accel.commands.launch_config"),
    ],
)
def test_a_documented_path_leads_to_the_working_module(path: str, name: str, home: str) -> None:
    found = getattr(importlib.import_module(path), name)
    assert found is getattr(importlib.import_module(home), name)


def test_constants_name_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    import torch

    from accel import Accelerator, utils

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.prepare(model, optimizer, scheduler)
    accelerator.save_state(tmp_path / "safe")
    accelerator.save_state(tmp_path / "pickled", safe_serialization=False)
    accelerator.end_training()
    names = {f"{utils.OPTIMIZER_NAME}.bin", f"{utils.SCHEDULER_NAME}.bin"}
    names.add(f"{utils.RNG_STATE_NAME}_0.pkl")
    for folder, weights in (("safe", utils.SAFE_WEIGHTS_NAME), ("pickled", utils.WEIGHTS_NAME)):
        assert names | {weights} <= {path.name for path in (tmp_path / folder).iterdir()}
    assert f"{utils.SAFE_MODEL_NAME}.safetensors" == utils.SAFE_WEIGHTS_NAME
    assert f"{utils.MODEL_NAME}.bin" == utils.WEIGHTS_NAME
