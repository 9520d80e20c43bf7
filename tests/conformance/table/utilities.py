"""Enumerations, environment checks and modules (documentation pages: utilities, internals).

The parameters that the pages print for an enumeration (`names`, `module`, `start`, …) are those of
Python's own `enum.EnumType.__call__`; of them only `value` means something for one with members.
"""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, documented

ENUMS = "test_values"
VERSIONS = "test_compare_versions"
XLA = "test_torch_xla_and_the_device_it_computes_on"
BF16 = "test_bf16_is_a_matter_of_the_device"
EXTRACTED = "test_a_model_is_taken_out_of_its_containers"
COMPILED = "test_a_compiled_module_is_recognized"


def values(name: str, *members: str) -> Entry:
    """Return the rows of an enumeration."""
    kind = name.rpartition(":")[2]
    return Entry(name, attributes={m: f"{ENUMS}[{kind}]" for m in members}, call=False)


ENTRIES = [
    values(
        "accel:DistributedType",
        *("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "TPU", "FSDP", "MEGATRON_LM", "XLA"),
        *("MULTI_HPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_NEURON", "MULTI_NPU", "MULTI_SDAA"),
        "MULTI_XPU",
    ),
    values(
        "accel.utils:LoggerType",
        *("ALL", "TENSORBOARD", "WANDB", "COMETML", "AIM", "CLEARML", "DVCLIVE", "MLFLOW"),
        *("SWANLAB", "TRACKIO"),
    ),
    values(
        "accel.utils:RNGType",
        *("HPU", "MLU", "MUSA", "NEURON", "NPU", "SDAA", "XPU"),
    ),
    values(
        "accel.utils:DynamoBackend",
        *("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER"),
        *("CUDAGRAPHS", "OFI", "FX2TRT", "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE"),
        *("TORCHXLA_TRACE_ONCE", "TVM", "HPU_BACKEND", "NEURON"),
    ),
    values("accel.utils.dataclasses:FP8BackendType", "NO", "TE", "MSAMP", "AO"),
    values("accel.utils:PrecisionType", "NO", "FP8", "FP16", "BF16"),
    values("accel.utils:CustomDtype", "FP8", "INT4", "INT2"),
    values("accel.utils:ComputeEnvironment", "LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
    values("accel.utils:SageMakerDistributedType", "NO", "DATA_PARALLEL", "MODEL_PARALLEL"),
    Entry("accel.utils:BaseEnum.list", "test_values[PrecisionType]"),
    documented(
        "accel.utils:compare_versions",
        VERSIONS,
        library_or_version=REQUIRED,
        operation=REQUIRED,
        requirement=REQUIRED,
    ),
    documented("accel.utils:is_compiled_module", COMPILED, module=REQUIRED),
    documented("accel.utils:is_bf16_available", BF16, ignore_tpu=False),
    documented("accel.utils:is_torch_version", VERSIONS, operation=REQUIRED, version=REQUIRED),
    documented("accel.utils:is_torch_xla_available", XLA, check_is_tpu=False, check_is_gpu=False),
    documented(
        "accel.utils:extract_model_from_parallel",
        EXTRACTED,
        NoOp.FIRST,
        model=REQUIRED,
        keep_fp32_wrapper=True,
    ),
]
