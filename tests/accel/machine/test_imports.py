"""Optional packages are asked for, and missed, in one way (E5)."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from accel.machine import imports
from accel.machine.errors import ConfigError, MissingPackageError
from tests.conformance.table.libraries import DEVICES
from tests.conformance.table.libraries import PACKAGES as NAMED


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


# Import names of packages that are not called as in the name of their check.
PACKAGES = {
    "bnb": "bitsandbytes",
    "ccl": "oneccl_bindings_for_pytorch",
    "fp8": "torchao",
    "ipex": "intel_extension_for_pytorch",
    "lomo": "lomo_optim",
    "megatron_lm": "megatron.core",
    "pippy": "torch.distributed.pipelining",
    "torchdata_stateful_dataloader": "torchdata.stateful_dataloader",
}


@pytest.mark.parametrize("kind", [*NAMED, "bnb"])
def test_a_check_asks_for_its_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, package = getattr(imports, f"is_{kind}_available"), PACKAGES.get(kind, kind)
    monkeypatch.setattr(imports, "is_available", lambda name: name == package)
    assert check() is True
    monkeypatch.setattr(imports, "is_available", lambda name: False)
    assert check() is False


def test_cuda_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for available in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=available: found)
        assert imports.is_cuda_available() is available


class _Device:
    """What torch, or a package that plugs into it, offers for a kind of device."""

    def __init__(self, available: bool, count: int | None) -> None:
        self.available, self.count = available, count

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        if self.count is None:
            raise RuntimeError("no driver")
        return self.count


@pytest.mark.parametrize("kind", DEVICES)
def test_devices_that_a_package_plugs_into_torch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = {"xpu": "torch", "neuron": "torch_neuronx"}.get(kind, f"torch_{kind}")
    check = getattr(imports, f"is_{kind}_available")
    monkeypatch.setattr(imports, "is_available", lambda name: name == package)
    if package != "torch":
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    for available, count, plain, checked in [
        (True, 2, True, True),
        (True, 0, True, False),
        (True, None, True, False),
        (False, 2, False, False),
    ]:
        monkeypatch.setattr(torch, kind, _Device(available, count), raising=False)
        assert check() is plain
        assert check(check_device=True) is checked
    monkeypatch.setattr(imports, "is_available", lambda name: False)
    assert check() is False


def test_gaudi_with_its_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(imports, "is_available", lambda name: name == "habana_frameworks")
    real = imports.importlib.import_module

    def import_module(name: str) -> object:
        imported.append(name)
        return real(name) if name == "torch" else types.ModuleType(name)

    monkeypatch.setattr(imports.importlib, "import_module", import_module)
    monkeypatch.setattr(torch, "hpu", _Device(True, 1), raising=False)
    assert imports.is_hpu_available() is True
    assert not [name for name in imported if "hccl" in name]
    assert imports.is_hpu_available(init_hccl=True) is True
    assert [name for name in imported if "hccl" in name]
    monkeypatch.setattr(imports, "is_available", lambda name: False)
    assert imports.is_hpu_available() is False


def test_apples_gpu_needs_a_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert imports.is_mps_available()
    assert not imports.is_mps_available(min_version="99")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert not imports.is_mps_available()


def test_a_running_program_installs_nothing() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'torch_xla\[tpu\]"):
        imports.install_xla(upgrade=True)


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


def test_bf16_is_a_matter_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert imports.is_bf16_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert not imports.is_bf16_available()
    monkeypatch.setattr(imports, "is_torch_xla_available", lambda check_is_tpu: check_is_tpu)
    assert imports.is_bf16_available()
    assert not imports.is_bf16_available(ignore_tpu=True)


def test_fp16_is_missing_on_the_first_gaudi_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imports.is_fp16_available()
    experimental = types.ModuleType("experimental")
    monkeypatch.setattr(imports, "is_hpu_available", lambda: True)
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.utils.experimental", experimental)
    for supported in (True, False):
        experimental._is_fp16_supported = lambda on=supported: on  # type: ignore[attr-defined]
        assert imports.is_fp16_available() is supported


def test_rocm_is_a_build_of_torch_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for build, gpu, expected in [("6.4", True, True), ("6.4", False, False), (None, True, False)]:
        monkeypatch.setattr(torch.version, "hip", build)
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=gpu: found)
        assert imports.is_rocm_available() is expected


def test_xccl_is_of_torchs_build(monkeypatch: pytest.MonkeyPatch) -> None:
    for built in (True, False):
        monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda found=built: found)
        assert imports.is_xccl_available() is built
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert imports.is_xccl_available() is False


def test_weights_are_read_alone_from_a_version_of_torch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imports.is_weights_only_available()
    monkeypatch.setattr(imports.importlib.metadata, "version", lambda name: "2.3.1")
    assert not imports.is_weights_only_available()


@pytest.mark.parametrize(
    ("version", "eight", "four"),
    [("0.37.1", False, False), ("0.37.2", True, False), ("0.39.0", True, True)],
)
def test_bits_of_bitsandbytes_by_its_version(
    monkeypatch: pytest.MonkeyPatch, version: str, eight: bool, four: bool
) -> None:
    monkeypatch.setattr(imports, "is_available", lambda name: name == "bitsandbytes")
    monkeypatch.setattr(imports.importlib.metadata, "version", lambda name: version)
    assert imports.is_8bit_bnb_available() is eight
    assert imports.is_4bit_bnb_available() is four
    assert imports.is_bnb_available(min_version=version)
    assert not imports.is_bnb_available(min_version="99")
    monkeypatch.setattr(imports, "is_available", lambda name: False)
    assert not imports.is_8bit_bnb_available()
    assert not imports.is_4bit_bnb_available()
    assert not imports.is_bnb_available(min_version="0.1")


def test_bitsandbytes_for_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_available", lambda name: False)
    assert not imports.is_bitsandbytes_multi_backend_available()
    package = types.ModuleType("bitsandbytes")
    monkeypatch.setattr(imports, "is_available", lambda name: name == "bitsandbytes")
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    assert not imports.is_bitsandbytes_multi_backend_available()
    package.features = {"multi_backend"}  # type: ignore[attr-defined]
    assert imports.is_bitsandbytes_multi_backend_available()


def test_mxfp8_is_a_matter_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not imports.is_transformer_engine_mxfp8_available()
    fp8 = types.ModuleType("transformer_engine.pytorch.fp8")
    monkeypatch.setattr(imports, "is_available", lambda name: name == "transformer_engine")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", fp8)
    assert not imports.is_transformer_engine_mxfp8_available()  # of a release before 2.0
    for supported in (True, False):
        fp8.check_mxfp8_support = lambda on=supported: (on, "")  # type: ignore[attr-defined]
        assert imports.is_transformer_engine_mxfp8_available() is supported
