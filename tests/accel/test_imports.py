"""Optional packages are asked for, and missed, in one way."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

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


@pytest.mark.parametrize(("kind", "tpu", "gpu"), [("TPU", 1, 0), ("CUDA", 0, 1), ("CPU", 0, 0)])
def test_torch_xla_and_the_device_it_computes_on(
    monkeypatch: pytest.MonkeyPatch, kind: str, tpu: bool, gpu: bool
) -> None:
    runtime = types.ModuleType("torch_xla.runtime")
    runtime.device_type = lambda: kind  # type: ignore[attr-defined]
    monkeypatch.setattr(imports, "is_available", lambda package: package == "torch_xla")
    monkeypatch.setitem(sys.modules, "torch_xla", types.ModuleType("torch_xla"))
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    assert imports.is_torch_xla_available()
    assert imports.is_torch_xla_available(check_is_tpu=True) == tpu
    assert imports.is_torch_xla_available(check_is_gpu=True) == gpu
    with pytest.raises(ConfigError, match="one kind of device"):
        imports.is_torch_xla_available(True, True)


def test_without_torch_xla_it_has_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_available", lambda package: False)
    for check in ({}, {"check_is_tpu": True}, {"check_is_gpu": True}):
        assert imports.is_torch_xla_available(**check) is False


def test_bf16_is_a_matter_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert imports.is_bf16_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert not imports.is_bf16_available()
    monkeypatch.setattr(imports, "is_torch_xla_available", lambda check_is_tpu: check_is_tpu)
    assert imports.is_bf16_available()
    assert not imports.is_bf16_available(ignore_tpu=True)
