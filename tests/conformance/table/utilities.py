"""Enumerations, environment checks and modules (documentation pages: utilities, internals).

The parameters that the pages print for an enumeration (`names`, `module`, `start`, …) are those of
Python's own `enum.EnumType.__call__`; of them only `value` means something for one with members.
"""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, documented

VERSIONS = "test_compare_versions"
XLA = "test_torch_xla_and_the_device_it_computes_on"
BF16 = "test_bf16_is_a_matter_of_the_device"
EXTRACTED = "test_a_model_is_taken_out_of_its_containers"
COMPILED = "test_a_compiled_module_is_recognized"


def same(*names: str) -> dict[str, str]:
    """Return members whose values are their names."""
    return {name: name for name in names}


def lower(*values: str) -> dict[str, str]:
    """Return members whose names are their values in capitals."""
    return {value.upper(): value for value in values}


# Documented members and their values.
ENUMERATIONS: dict[str, dict[str, str]] = {
    "accel:DistributedType": {
        **same("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"),
        **same("MULTI_HPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_NEURON", "MULTI_NPU", "MULTI_SDAA"),
        **{"MULTI_XPU": "MULTI_XPU", "TPU": "XLA"},  # an older name
    },
    "accel.utils:LoggerType": {
        **lower("all", "tensorboard", "wandb", "aim", "clearml", "dvclive", "mlflow", "swanlab"),
        **{"TRACKIO": "trackio", "COMETML": "comet_ml"},
    },
    "accel.utils:RNGType": lower(
        *("torch", "cuda", "generator", "xla", "hpu", "mlu", "musa", "neuron", "npu", "sdaa", "xpu")
    ),
    "accel.utils:DynamoBackend": lower(
        *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser"),
        *("cudagraphs", "ofi", "fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once"),
        *("torchxla_trace_once", "tvm", "hpu_backend", "neuron"),
    ),
    "accel.utils.dataclasses:FP8BackendType": same("NO", "TE", "MSAMP", "AO"),
    "accel.utils:PrecisionType": lower("no", "fp8", "fp16", "bf16"),
    "accel.utils:CustomDtype": lower("fp8", "int4", "int2"),
    "accel.utils:ComputeEnvironment": same("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
    "accel.utils:SageMakerDistributedType": same("NO", "DATA_PARALLEL", "MODEL_PARALLEL"),
}

ENTRIES = [
    *(
        Entry(name, attributes=dict.fromkeys(members, f"test_values[{name}]"), call=False)
        for name, members in ENUMERATIONS.items()
    ),
    Entry("accel.utils:BaseEnum.list", "test_values[accel.utils:PrecisionType]"),
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
