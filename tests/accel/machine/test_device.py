"""Which device a process gets (E5)."""

from __future__ import annotations

import pytest
import torch

from accel.machine import device, imports
from accel.machine.errors import ConfigError, MissingPackageError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report two CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))


def test_cpu_is_always_there() -> None:
    assert device.resolve_device("cpu", 5) == torch.device("cpu")


def test_auto_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert device.resolve_device("auto", 0) == torch.device("cpu")
    assert device.resolve_device(None, 1) == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
def test_each_local_rank_has_a_device_of_its_own() -> None:
    assert device.resolve_device(None, 0) == torch.device("cuda:0")
    assert device.resolve_device("cuda", 1) == torch.device("cuda:1")
    assert device.resolve_device("cuda:1", 0) == torch.device("cuda:1")


@pytest.mark.usefixtures("two_gpus")
def test_a_process_that_sees_its_own_devices_takes_the_first() -> None:
    """As under ``srun --gpus-per-task=2``; with 1 the launcher binds nothing."""
    assert device.resolve_device(None, 3, own_devices=2) == torch.device("cuda:0")
    assert device.resolve_device(None, 1, own_devices=1) == torch.device("cuda:1")


@pytest.mark.usefixtures("two_gpus")
def test_more_processes_than_devices() -> None:
    with pytest.raises(ConfigError, match=r"2 cuda devices.*at least 3.*at most 2 processes"):
        device.resolve_device("auto", 2)


def test_no_such_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no such device.*cpu=True"):
        device.resolve_device("xpu", 0)


def test_unknown_kind() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'cuda'"):
        device.resolve_device("cdua", 0)


def test_a_tpu_wants_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_available", lambda package: False)
    monkeypatch.setattr(imports, "is_available", lambda package: False)
    with pytest.raises(MissingPackageError, match=r"device='xla'.*torch_xla.*accel-runner\[xla\]"):
        device.resolve_device("xla", 0)


def test_torch_xla_is_the_default_where_its_runtime_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(device, "is_available", lambda package: package == "torch_xla")
    assert (device.default_device_type(), device.device_count("xla")) == ("xla", 1)
    monkeypatch.setattr(device, "is_available", lambda package: False)
    assert device.default_device_type() != "xla"


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "xccl")])
def test_backend_of_a_device(kind: str, backend: str) -> None:
    assert device.process_group_backend(kind) == backend


@pytest.mark.gpu
def test_use_and_synchronize() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    device.use_device(last)
    assert torch.zeros(1, device="cuda").device == last
    device.synchronize(last)
    assert device.resolve_device(None, 0) == torch.device("cuda:0")
