"""E1: documented names are importable from their documented paths."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import subprocess
from pathlib import Path
from unittest import mock

import pytest

import accel
import accel.utils
import runner
from accel._exports import EXPORTS
from tests.helpers import python
from tests.stubs import stubs

# Documented paths of names that the conformance table has from another path, the package apart.
DOCUMENTED = {
    "accel": """
        AcceleratorState GradientState FP8RecipeKwargs ProfileKwargs DataLoaderConfiguration
        GradientAccumulationPlugin ProjectConfiguration prepare_data_loader synchronize_rng_states
    """,
    "accel.accelerator": "Accelerator",
    "accel.launchers": "notebook_launcher debug_launcher",
    "accel.utils": "TorchTensorParallelPlugin",
    "accel.utils.environment": """
        clear_environment patch_environment purge_accelerate_environment set_numa_affinity
        str_to_bool parse_flag_from_env parse_choice_from_env get_int_from_env
    """,
    "accel.utils.other": "convert_bytes is_port_in_use merge_dicts",
    "accel.utils.dataclasses": "ComputeEnvironment CustomDtype SageMakerDistributedType",
    "accel.utils.fsdp_utils": "merge_fsdp_weights",
}


@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_names_are_where_they_should_be(path: str) -> None:
    module = importlib.import_module(path)
    missing = [name for name in DOCUMENTED[path].split() if not hasattr(module, name)]
    assert missing == []


@pytest.mark.parametrize("path", sorted({*EXPORTS, "runner"} - {"accel.utils.constants"}))
def test_every_name_of_a_documented_module_is_there(path: str) -> None:
    module = importlib.import_module(path)
    assert set(module.__all__) <= set(dir(module))
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def test_type_checkers_are_told_of_the_same_names() -> None:
    """Mended by ``python -m tests.stubs``."""
    assert {path: path.read_text() for path in stubs()} == stubs()
    lines = ast.parse(Path(runner.__file__).with_suffix(".pyi").read_text()).body
    told = {
        alias.name: line.module
        for line in lines
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    assert told == runner._HOMES


@pytest.mark.parametrize("path", ["utils", "utils.dataclasses", "utils.tqdm", "state", "hooks"])
def test_a_documented_module_is_there_after_the_import_of_its_package(path: str) -> None:
    """In a process of its own: another test may have imported the module."""
    names = {"utils.tqdm": "run.progress.tqdm"}  # the function, as documented
    home = names.get(path, path)
    code = f"import accel, accel.{path}, accel.{home.rpartition('.')[0] or path}\n"
    code += f"assert accel.{path} is accel.{home}"
    subprocess.run(python("-c", code), check=True, timeout=120)


def test_a_documented_module_is_a_module() -> None:
    """Its names can be patched, and what pickles by them is found again."""
    with mock.patch("accel.utils.other.save", 3):
        assert importlib.import_module("accel.utils.other").save == 3
    assert accel.utils.other.save is accel.utils.save
    assert pickle.loads(b"caccel.utils.dataclasses\nProjectConfiguration\n.") is (
        accel.utils.ProjectConfiguration
    )
    assert importlib.util.find_spec("accel.hooks") is not None


def test_a_submodule_of_the_runner_is_imported_without_the_engine() -> None:
    probe = "import sys; from runner import cli, exit_codes; print('accel' in sys.modules)"
    command = python("-c", probe)
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert answer.stdout.strip() == "False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'accel' has no attribute 'Acelerator'"):
        accel.Acelerator  # noqa: B018
    for name in ("_lazy_", "__wrapped__"):
        assert not hasattr(accel, name)
    assert {"Accelerator", "PartialState"} <= set(dir(accel))
