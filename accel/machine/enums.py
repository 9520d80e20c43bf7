"""The enumerations of the public API. Each member compares equal to its string value."""

from __future__ import annotations

from enum import EnumMeta, StrEnum


class _ContainsMeta(EnumMeta):
    """Let ``"fp16" in PrecisionType`` ask for a value, as Python 3.12 does."""

    def __contains__(cls, item: object) -> bool:
        return isinstance(item, cls) or item in cls._value2member_map_


class BaseEnum(StrEnum, metaclass=_ContainsMeta):
    """A string enumeration whose `str` is its value."""

    @classmethod
    def list(cls) -> list[str]:
        """Return the values in the order of definition."""
        return [member.value for member in cls]


class DistributedType(BaseEnum):
    """How the processes of a run work together; reported, never branched on by the engine."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    TP = "TP"
    XLA = "XLA"
    TPU = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class PrecisionType(BaseEnum):
    """The number format that a step computes in."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class CustomDtype(BaseEnum):
    """Formats of weights that torch has no dtype of, or that several elements of share a byte."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class FP8BackendType(BaseEnum):
    """The library that computes in fp8: TransformerEngine, MS-AMP or torchao."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class LoggerType(BaseEnum):
    """The experiment trackers. ``all``: those of installed libraries (``csv`` needs none)."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    COMETML = "comet_ml"
    AIM = "aim"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"
    TRACKIO = "trackio"
    CSV = "csv"


class RNGType(BaseEnum):
    """A random number generator that ranks can synchronise."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    XLA = "xla"
    GENERATOR = "generator"


class DynamoBackend(BaseEnum):
    """The backends of `torch.compile` (``torch._dynamo.list_backends()``)."""

    NO = "no"
    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    AOT_TS_NVFUSER = "aot_ts_nvfuser"
    NVPRIMS_NVFUSER = "nvprims_nvfuser"
    CUDAGRAPHS = "cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    TENSORRT = "tensorrt"
    AOT_TORCHXLA_TRACE_ONCE = "aot_torchxla_trace_once"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    IPEX = "ipex"
    TVM = "tvm"
    HPU_BACKEND = "hpu_backend"
    NEURON = "neuron"


class DDPCommunicationHookType(BaseEnum):
    """The gradient communication hooks of `DistributedDataParallel`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class ComputeEnvironment(BaseEnum):
    """Where a run's processes are started."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(BaseEnum):
    """How the processes of an Amazon SageMaker job work together."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"
