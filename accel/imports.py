"""Which packages and devices this machine has, and the one way to import an optional package."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import operator
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from packaging.version import Version, parse

from accel.errors import ConfigError, MissingPackageError, unknown_choice

OPERATORS: dict[str, Callable[[Version, Version], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


@cache
def is_available(package: str) -> bool:
    """Return whether `package` (its import name) is installed; does not import it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a parent package is missing, or a module without a spec
        return False


def require(
    module: str, needed_for: str, package: str | None = None, extra: str | None = None
) -> ModuleType:
    """Import and return an optional package, or raise a `MissingPackageError`.

    Args:
        needed_for: what asks for it, for the message.
        package: its name in the package index, where that is not the import name.
        extra: the extra of this distribution that brings it.
    """
    if not is_available(module.partition(".")[0]):
        raise MissingPackageError(package or module, needed_for, extra)
    return importlib.import_module(module)


def load_attribute(place: str) -> Any:
    """Import and return what ``"package.module:attribute"`` names."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def compare_versions(library_or_version: str | Version, operation: str, requirement: str) -> bool:
    """Return whether a version stands in a relation to another.

    Args:
        library_or_version: a version, or the name of an installed distribution.
        operation: one of > >= == != <= <.
        requirement: the version to compare with.

    Raises:
        ConfigError: for another `operation`.
    """
    if operation not in OPERATORS:
        raise ConfigError(unknown_choice("operation", operation, OPERATORS))
    if isinstance(library_or_version, str):
        library_or_version = parse(importlib.metadata.version(library_or_version))
    return OPERATORS[operation](library_or_version, parse(requirement))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version stands in a relation to another.

    Args:
        operation: one of > >= == != <= <.
        version: the version to compare with, without a build's suffix: "2.9.0".
    """
    return compare_versions(
        parse(parse(importlib.metadata.version("torch")).base_version), operation, version
    )


def is_cuda_available() -> bool:
    """Return whether a CUDA device can be used."""
    import torch

    return torch.cuda.is_available()


def is_mps_available() -> bool:
    """Return whether Apple's GPU can be used."""
    import torch

    return torch.backends.mps.is_available()


def is_xpu_available() -> bool:
    """Return whether an Intel GPU can be used."""
    import torch

    return torch.xpu.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed, and computes on the requested kind of device.

    Args:
        check_is_tpu: whether it has to find a TPU, too.
        check_is_gpu: whether it has to find a GPU, too.

    Raises:
        ConfigError: for both at once.

    Source: https://docs.pytorch.org/xla/release/r2.9/learn/api-guide.html
    """
    if check_is_tpu and check_is_gpu:
        raise ConfigError.of(
            "check_is_tpu=True, check_is_gpu=True",
            "torch_xla computes on one kind of device",
            "Ask for one of them.",
        )
    if not is_available("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA", "ROCM")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the device of this machine computes in bf16.

    Args:
        ignore_tpu: whether the question is about the other devices, though there is a TPU (which
            does compute in bf16).
    """
    import torch

    if not ignore_tpu and is_torch_xla_available(check_is_tpu=True):
        return True
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    if torch.backends.mps.is_available():
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def is_tensorboard_available() -> bool:
    """Return whether TensorBoard is installed."""
    return is_available("tensorboard") or is_available("tensorboardX")


def is_rich_available() -> bool:
    """Return whether rich is installed."""
    return is_available("rich")


def is_torchdata_available() -> bool:
    """Return whether torchdata is installed."""
    return is_available("torchdata")
