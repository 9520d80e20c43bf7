"""Which packages and devices this machine has, and the one way to import an optional package."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import operator
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from accel.machine.errors import ConfigError, MissingPackageError, unknown_choice

if TYPE_CHECKING:
    from packaging.version import Version

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


@cache
def is_available(package: str) -> bool:
    """Return whether `package` (its import name) is installed; does not import it.

    A folder of that name without modules, such as the `wandb` that runs leave, is no package.
    """
    try:
        spec = importlib.util.find_spec(package)
        return spec is not None and spec.origin is not None
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
    from packaging.version import parse

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
    from packaging.version import parse

    return compare_versions(
        parse(parse(importlib.metadata.version("torch")).base_version), operation, version
    )


def is_cuda_available() -> bool:
    """Return whether a CUDA device can be used."""
    import torch

    return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether Apple's GPU can be used.

    Args:
        min_version: lowest version of torch.
    """
    import torch

    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def _device_check(kind: str, package: str) -> Callable[[bool], bool]:
    """Return the function that says whether there is a device of a `kind` of `torch.device`.

    Args:
        kind: name of torch's module for it.
        package: plugs the device into torch when it is imported; "torch" for torch's own.
    """

    def is_device_available(check_device: bool = False) -> bool:
        """Return whether torch can compute on this kind of device.

        Args:
            check_device: whether its driver is asked, too, for at least one device.
        """
        if not is_available(package):
            return False
        importlib.import_module(package)
        module = getattr(importlib.import_module("torch"), kind, None)
        if module is None or not module.is_available():
            return False
        try:
            return not check_device or module.device_count() > 0
        except RuntimeError:  # of a driver that finds none
            return False

    return is_device_available


is_xpu_available = _device_check("xpu", "torch")
is_npu_available = _device_check("npu", "torch_npu")
is_mlu_available = _device_check("mlu", "torch_mlu")
is_musa_available = _device_check("musa", "torch_musa")
is_sdaa_available = _device_check("sdaa", "torch_sdaa")
is_neuron_available = _device_check("neuron", "torch_neuronx")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether Intel's Gaudi can be used.

    Args:
        init_hccl: whether its backend of collectives is imported, too.
    """
    if not is_available("habana_frameworks"):
        return False
    importlib.import_module("habana_frameworks.torch")
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    module = getattr(importlib.import_module("torch"), "hpu", None)
    return module is not None and bool(module.is_available())


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


def install_xla(upgrade: bool = False) -> NoReturn:
    """Refuse to install torch_xla: a running program installs nothing.

    Args:
        upgrade: not used.

    Raises:
        ConfigError: always; it names the command.
    """
    version = importlib.metadata.version("torch").partition("+")[0]
    raise ConfigError.of(
        "install_xla",
        "a running program installs no packages",
        f"Run: pip install 'torch_xla[tpu]~={version}'.",
    )


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


def is_fp16_available() -> bool:
    """Return whether the device of this machine computes in fp16: all but the first Gaudi do."""
    if not is_hpu_available():
        return True
    experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._is_fp16_supported())


def is_rocm_available() -> bool:
    """Return whether an AMD GPU can be used: torch is built for ROCm, and finds one."""
    import torch

    return torch.version.hip is not None and torch.cuda.is_available()


def is_xccl_available() -> bool:
    """Return whether torch is built with XCCL, the collectives of Intel's GPUs."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_xccl_available()


def is_weights_only_available() -> bool:
    """Return whether `torch.load(weights_only=True)` reads checkpoints: from torch 2.4 on."""
    return is_torch_version(">=", "2.4.0")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, without importing it.

    Args:
        min_version: lowest version of it; None: any.
    """
    if not is_available("bitsandbytes"):
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes has layers with 8-bit weights: from 0.37.2 on."""
    return is_bnb_available(min_version="0.37.2")


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes has layers with 4-bit weights: from 0.39.0 on."""
    return is_bnb_available(min_version="0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes computes on other devices than CUDA's, too."""
    if not is_bnb_available():
        return False
    features = getattr(importlib.import_module("bitsandbytes"), "features", ())
    return "multi_backend" in features


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether TransformerEngine computes in MXFP8 on this machine's GPU."""
    if not is_available("transformer_engine"):
        return False
    fp8 = importlib.import_module("transformer_engine.pytorch.fp8")
    check = getattr(fp8, "check_mxfp8_support", None)  # from TransformerEngine 2.0 on
    return check is not None and bool(check()[0])


def _package_check(*packages: str) -> Callable[[], bool]:
    """Return the function that says whether one of the packages (import names) is installed."""

    def is_package_available() -> bool:
        """Return whether the package is installed, without importing it."""
        return any(is_available(package) for package in packages)

    return is_package_available


# Trackers.
is_aim_available = _package_check("aim")
is_clearml_available = _package_check("clearml")
is_comet_ml_available = _package_check("comet_ml")
is_dvclive_available = _package_check("dvclive")
is_mlflow_available = _package_check("mlflow")
is_swanlab_available = _package_check("swanlab")
is_tensorboard_available = _package_check("tensorboard", "tensorboardX")
is_trackio_available = _package_check("trackio")
is_wandb_available = _package_check("wandb")
# Engines and number formats.
is_ccl_available = _package_check("oneccl_bindings_for_pytorch", "torch_ccl")
is_deepspeed_available = _package_check("deepspeed")
is_ipex_available = _package_check("intel_extension_for_pytorch")
is_megatron_lm_available = _package_check("megatron.core")
is_msamp_available = _package_check("msamp")
is_pippy_available = _package_check("torch.distributed.pipelining")
is_torchao_available = _package_check("torchao")
is_transformer_engine_available = _package_check("transformer_engine")
is_fp8_available = _package_check("msamp", "transformer_engine", "torchao")
is_triton_available = _package_check("triton")
# Optimizers.
is_lomo_available = _package_check("lomo_optim")
is_schedulefree_available = _package_check("schedulefree")
# Libraries beside.
is_amdsmi_available = _package_check("amdsmi")
is_boto3_available = _package_check("boto3")
is_datasets_available = _package_check("datasets")
is_import_timer_available = _package_check("import_timer")
is_matplotlib_available = _package_check("matplotlib")
is_pandas_available = _package_check("pandas")
is_peft_available = _package_check("peft")
is_pynvml_available = _package_check("pynvml")
is_pytest_available = _package_check("pytest")
is_rich_available = _package_check("rich")
is_sagemaker_available = _package_check("sagemaker")
is_timm_available = _package_check("timm")
is_torchdata_available = _package_check("torchdata")
is_torchdata_stateful_dataloader_available = _package_check("torchdata.stateful_dataloader")
is_torchvision_available = _package_check("torchvision")
is_tqdm_available = _package_check("tqdm")
is_transformers_available = _package_check("transformers")
