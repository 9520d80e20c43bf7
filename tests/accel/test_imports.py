"""Optional packages are asked for, and missed, in one way."""

from __future__ import annotations

import json
import sys

import pytest

from accel import imports
from accel.errors import ConfigError, MissingPackageError


def test_is_available_does_not_import() -> None:
    was_there = "this" in sys.modules
    assert imports.is_available("this")
    assert ("this" in sys.modules) == was_there
    assert not imports.is_available("no_such_package")
    assert not imports.is_available("no_such_package.part")


def test_require_returns_the_module() -> None:
    assert imports.require("json", "a test") is json


def test_require_tells_how_to_install() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install 'accel-runner\[extra\]'"):
        imports.require("no_such_package", "log_with='x'", extra="extra")
    with pytest.raises(MissingPackageError, match="pip install right-name"):
        imports.require("no_such_package.part", "log_with='x'", package="right-name")


def test_compare_versions() -> None:
    assert imports.compare_versions("torch", ">=", "2.9")
    assert imports.is_torch_version(">", "1.13.1")
    assert not imports.is_torch_version("<", "2.9")
    with pytest.raises(ConfigError, match="one of >, >="):
        imports.compare_versions("torch", "=", "2.9")


def test_what_this_machine_has() -> None:
    assert imports.is_tensorboard_available()
    assert imports.is_rich_available()
    assert isinstance(imports.is_bf16_available(), bool)
