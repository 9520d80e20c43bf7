"""The documented names of the engine, by their documented modules. Imports none of them.

A documented module holds names of the modules that do the work. Most have no file: `install` puts
them into ``sys.modules``, empty, and a name is looked up when it is first used (PEP 562). Type
checkers read stubs, which ``python -m tests.stubs`` writes from this table.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType

# Names that several documented modules have.
FP8_RECIPES = (
    "AORecipeKwargs",
    "FP8RecipeKwargs",
    "MSAMPRecipeKwargs",
    "TERecipeKwargs",
)
HANDLERS = (
    "AutocastKwargs",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "ProfileKwargs",
)
TRAINING = (
    "DataLoaderConfiguration",
    "GradientAccumulationPlugin",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
)
DISPATCH = (
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
)
DEVICE_MAP = (
    "check_device_map",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
)
TIES = (
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "find_tied_parameters",
    "retie_parameters",
)
# Documented module → module that does the work → names; "x as y" is called y in the former.
EXPORTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "accel": {
        "accel.accelerator": ("Accelerator",),
        "accel.comm.rng": ("synchronize_rng_states",),
        "accel.config.deepspeed": ("DeepSpeedPlugin",),
        "accel.config.fp8": FP8_RECIPES,
        "accel.config.fsdp": ("FullyShardedDataParallelPlugin",),
        "accel.config.handlers": HANDLERS,
        "accel.config.megatron": ("MegatronLMPlugin",),
        "accel.config.parallelism": ("ParallelismConfig",),
        "accel.config.tensor_parallel": ("TorchTensorParallelPlugin",),
        "accel.config.training": TRAINING,
        "accel.data.prepare": ("prepare_data_loader", "skip_first_batches"),
        "accel.inference": ("prepare_pippy",),
        "accel.launchers": ("debug_launcher", "notebook_launcher"),
        "accel.local_sgd": ("LocalSGD",),
        "accel.machine.enums": ("DDPCommunicationHookType", "DistributedType"),
        "accel.machine.imports": ("is_rich_available",),
        "accel.machine.memory": ("find_executable_batch_size",),
        "accel.optimizer": ("AcceleratedOptimizer",),
        "accel.scheduler": ("AcceleratedScheduler",),
        "accel.state": ("AcceleratorState", "GradientState", "PartialState"),
        "accel.weights.device_map": ("infer_auto_device_map",),
        "accel.weights.dispatch": DISPATCH,
        "accel.weights.load": ("load_checkpoint_and_dispatch", "load_checkpoint_in_model"),
        "accel.weights.tensors": ("init_empty_weights", "init_on_device"),
    },
    "accel.big_modeling": {
        "accel.weights.device_hooks": ("attach_layerwise_casting_hooks",),
        "accel.weights.device_map": DEVICE_MAP,
        "accel.weights.dispatch": DISPATCH,
        "accel.weights.folder": (
            "OffloadedWeightsLoader",
            "extract_submodules_state_dict",
            "offload_state_dict",
        ),
        "accel.weights.load": (
            "load_checkpoint_and_dispatch",
            "load_checkpoint_in_model",
            "load_state_dict",
        ),
        "accel.weights.tensors": ("init_empty_weights", "init_on_device", *TIES),
    },
    "accel.checkpointing": {
        "accel.checkpoint.directory": (
            "is_complete",
            "newest_complete",
            "prune",
            "read_manifest",
            "verify",
        ),
    },
    "accel.data_loader": {
        "accel.data.stream": ("IterableDatasetShard",),
        "accel.data.loaders": ("DataLoaderDispatcher", "DataLoaderShard", "SkipDataLoader"),
        "accel.data.prepare": ("prepare_data_loader", "skip_first_batches"),
        "accel.data.samplers": ("BatchSamplerShard", "SeedableRandomSampler", "SkipBatchSampler"),
    },
    "accel.hooks": {
        "accel.weights.attach_hooks": (
            "attach_align_device_hook",
            "attach_align_device_hook_on_blocks",
            "attach_execution_device_hook",
        ),
        "accel.weights.device_hooks": ("CpuOffload", "LayerwiseCastingHook", "UserCpuOffloadHook"),
        "accel.weights.hooks": (
            "ModelHook",
            "SequentialHook",
            "add_hook_to_module",
            "remove_hook_from_module",
            "remove_hook_from_submodules",
        ),
        "accel.weights.offload": ("AlignDevicesHook",),
    },
    "accel.memory_utils": {
        "accel.machine.memory": ("find_executable_batch_size",),
    },
    "accel.parallelism_config": {
        "accel.config.parallelism": ("ParallelismConfig",),
    },
    "accel.tracking": {
        "accel.trackers.aim": ("AimTracker",),
        "accel.trackers.base": ("GeneralTracker", "on_main_process"),
        "accel.trackers.clearml": ("ClearMLTracker",),
        "accel.trackers.comet_ml": ("CometMLTracker",),
        "accel.trackers.csv": ("CSVTracker",),
        "accel.trackers.dvclive": ("DVCLiveTracker",),
        "accel.trackers.mlflow": ("MLflowTracker",),
        "accel.trackers.swanlab": ("SwanLabTracker",),
        "accel.trackers.table": (
            "LOGGER_TYPE_TO_CLASS",
            "filter_trackers",
            "get_available_trackers",
            "register_tracker_class",
        ),
        "accel.trackers.tensorboard": ("TensorBoardTracker",),
        "accel.trackers.trackio": ("TrackioTracker",),
        "accel.trackers.wandb": ("WandBTracker",),
    },
    "accel.utils": {
        "accel.config.parallelism": ("ParallelismConfig",),
        "accel.launchers": ("PrepareForLaunch",),
        "accel.machine.errors": ("DistributedOperationException",),
        "accel.machine.imports": ("install_xla",),
        "accel.precision.transformer_engine": (
            "apply_fp8_autowrap",
            "contextual_fp8_autocast",
            "convert_model",
            "has_transformer_engine_layers",
        ),
        "accel.strategies.context_parallel": ("shift_labels",),
        "accel.weights.quantize": ("load_and_quantize_model",),
    },
    "accel.utils.constants": {
        "accel.utils.constants": (
            "FSDP_AUTO_WRAP_POLICY",
            "FSDP_BACKWARD_PREFETCH",
            "FSDP_MODEL_NAME",
            "FSDP_SHARDING_STRATEGY",
            "FSDP_STATE_DICT_TYPE",
            "MODEL_NAME",
            "OPTIMIZER_NAME",
            "RNG_STATE_NAME",
            "SAFE_MODEL_NAME",
            "SAFE_WEIGHTS_INDEX_NAME",
            "SAFE_WEIGHTS_NAME",
            "SAMPLER_NAME",
            "SCALER_NAME",
            "SCHEDULER_NAME",
            "WEIGHTS_INDEX_NAME",
            "WEIGHTS_NAME",
        ),
    },
    "accel.utils.dataclasses": {
        "accel.config.deepspeed": ("DeepSpeedPlugin", "get_active_deepspeed_plugin"),
        "accel.config.fp8": FP8_RECIPES,
        "accel.config.fsdp": ("FullyShardedDataParallelPlugin", "get_module_class_from_name"),
        "accel.config.handlers": HANDLERS,
        "accel.config.megatron": ("MegatronLMPlugin",),
        "accel.config.quantization": ("BnbQuantizationConfig",),
        "accel.config.tensor_parallel": ("TorchTensorParallelPlugin",),
        "accel.config.training": TRAINING,
        "accel.machine.enums": (
            "BaseEnum",
            "ComputeEnvironment",
            "CustomDtype",
            "DDPCommunicationHookType",
            "DistributedType",
            "DynamoBackend",
            "FP8BackendType",
            "LoggerType",
            "PrecisionType",
            "RNGType",
            "SageMakerDistributedType",
        ),
    },
    "accel.utils.deepspeed": {
        "accel.config.deepspeed": ("get_active_deepspeed_plugin",),
        "accel.config.deepspeed_json": ("HfDeepSpeedConfig",),
        "accel.strategies.deepspeed.wrappers": (
            "DeepSpeedEngineWrapper",
            "DeepSpeedOptimizerWrapper",
            "DeepSpeedSchedulerWrapper",
            "DummyOptim",
            "DummyScheduler",
        ),
    },
    "accel.utils.environment": {
        "accel.machine.env": (
            "clear_environment",
            "get_int_from_env",
            "parse_choice_from_env",
            "parse_flag_from_env",
            "patch_environment",
            "purge_accelerate_environment",
            "str_to_bool",
        ),
        "accel.machine.numa": ("override_numa_affinity", "set_numa_affinity"),
    },
    "accel.utils.fsdp_utils": {
        "accel.strategies.mesh.utilities": (
            "disable_fsdp_ram_efficient_loading",
            "enable_fsdp_ram_efficient_loading",
            "fsdp2_load_full_state_dict",
            "fsdp2_prepare_model",
            "fsdp2_switch_optimizer_parameters",
            "get_parameters_from_modules",
            "load_fsdp_model",
            "load_fsdp_optimizer",
            "save_fsdp_model",
            "save_fsdp_optimizer",
        ),
        "accel.weights.files": ("merge_weights as merge_fsdp_weights",),
    },
    "accel.utils.imports": {
        "accel.machine.imports": (
            "is_4bit_bnb_available",
            "is_8bit_bnb_available",
            "is_aim_available",
            "is_amdsmi_available",
            "is_bf16_available",
            "is_bitsandbytes_multi_backend_available",
            "is_bnb_available",
            "is_boto3_available",
            "is_ccl_available",
            "is_clearml_available",
            "is_comet_ml_available",
            "is_cuda_available",
            "is_datasets_available",
            "is_deepspeed_available",
            "is_dvclive_available",
            "is_fp16_available",
            "is_fp8_available",
            "is_hpu_available",
            "is_import_timer_available",
            "is_ipex_available",
            "is_lomo_available",
            "is_matplotlib_available",
            "is_megatron_lm_available",
            "is_mlflow_available",
            "is_mlu_available",
            "is_mps_available",
            "is_msamp_available",
            "is_musa_available",
            "is_neuron_available",
            "is_npu_available",
            "is_pandas_available",
            "is_peft_available",
            "is_pippy_available",
            "is_pynvml_available",
            "is_pytest_available",
            "is_rich_available",
            "is_rocm_available",
            "is_sagemaker_available",
            "is_schedulefree_available",
            "is_sdaa_available",
            "is_swanlab_available",
            "is_tensorboard_available",
            "is_timm_available",
            "is_torch_xla_available",
            "is_torchao_available",
            "is_torchdata_available",
            "is_torchdata_stateful_dataloader_available",
            "is_torchvision_available",
            "is_tqdm_available",
            "is_trackio_available",
            "is_transformer_engine_available",
            "is_transformer_engine_mxfp8_available",
            "is_transformers_available",
            "is_triton_available",
            "is_wandb_available",
            "is_weights_only_available",
            "is_xccl_available",
            "is_xpu_available",
        ),
        "accel.precision.wrapping": ("is_peft_model",),
    },
    "accel.utils.megatron_lm": {
        "accel.strategies.megatron.placeholders": (
            "MegatronLMDummyDataLoader",
            "MegatronLMDummyScheduler",
        ),
        "accel.strategies.megatron.steps": (
            "AbstractTrainStep",
            "BertTrainStep",
            "GPTTrainStep",
            "T5TrainStep",
            "avg_losses_across_data_parallel_group",
        ),
    },
    "accel.utils.memory": {
        "accel.machine.memory": (
            "clear_device_cache",
            "find_executable_batch_size",
            "release_memory",
            "should_reduce_batch_size",
        ),
    },
    "accel.utils.modeling": {
        "accel.precision.amp": ("get_mixed_precision_context_manager",),
        "accel.precision.wrapping": ("is_peft_model",),
        "accel.strategies.mesh.gradients": ("get_grad_scaler",),
        "accel.weights.device_map": ("clean_device_map", *DEVICE_MAP),
        "accel.weights.load": ("load_checkpoint_in_model", "load_state_dict"),
        "accel.weights.sizes": (
            "calculate_maximum_sizes",
            "compute_module_sizes",
            "compute_module_total_buffer_size",
            "convert_file_size_to_int",
            "dtype_byte_size",
            "get_max_layer_size",
            "get_module_leaves",
        ),
        "accel.weights.state": (
            "align_module_device",
            "get_state_dict_from_offload",
            "get_state_dict_offloaded_model",
            "has_offloaded_params",
            "load_offloaded_weights",
        ),
        "accel.weights.tensors": (
            "check_device_same",
            "get_non_persistent_buffers",
            "id_tensor_storage",
            "named_module_tensors",
            "set_module_tensor_to_device",
            *TIES,
        ),
    },
    "accel.utils.offload": {
        "accel.weights.folder": (
            "OffloadedWeightsLoader",
            "PrefixedDataset",
            "extract_submodules_state_dict",
            "load_offloaded_weight",
            "offload_state_dict",
            "offload_weight",
            "save_offload_index",
        ),
    },
    "accel.utils.operations": {
        "accel.comm.ops": (
            "ConvertOutputsToFp32",
            "broadcast",
            "broadcast_object_list",
            "concatenate",
            "convert_outputs_to_fp32",
            "convert_to_fp32",
            "find_batch_size",
            "gather",
            "gather_object",
            "listify",
            "pad_across_processes",
            "reduce",
            "send_to_device",
            "slice_tensors",
        ),
        "accel.machine.tree": (
            "honor_type",
            "is_namedtuple",
            "is_tensor as is_torch_tensor",
            "recursively_apply",
        ),
    },
    "accel.utils.other": {
        "accel.checkpoint.export": ("save",),
        "accel.checkpoint.serialization": ("load",),
        "accel.comm.ops": ("wait_for_everyone",),
        "accel.commands.launch_config": ("write_basic_config",),
        "accel.launchers": ("is_port_in_use",),
        "accel.machine.tree": ("merge_dicts",),
        "accel.precision.wrapping": (
            "extract_model_from_parallel",
            "get_module_children_bottom_up",
            "is_compiled_module",
        ),
        "accel.weights.sizes": ("convert_bytes",),
    },
    "accel.utils.random": {
        "accel.comm.rng": ("set_seed", "synchronize_rng_state", "synchronize_rng_states"),
    },
    "accel.utils.tqdm": {
        "accel.run.progress": ("tqdm",),
    },
    "accel.utils.versions": {
        "accel.machine.imports": ("compare_versions", "is_torch_version"),
    },
}
UTILS = "accel.utils"
# Modules of the table that have a file of their own.
FILES = ("accel", UTILS, "accel.utils.constants")


@cache
def homes(documented: str) -> Mapping[str, tuple[str, str]]:
    """Return (module, attribute) of each name of a documented module.

    `accel.utils` has the names of all its modules, too.
    """
    parts = [
        part
        for module, part in EXPORTS.items()
        if module == documented or (documented == UTILS and module.startswith(f"{UTILS}."))
    ]
    found = {}
    for home, names in (item for part in parts for item in part.items()):
        for name in names:
            attribute, _, alias = name.partition(" as ")
            found[alias or attribute] = home, attribute
    return found


def lazy(
    documented: str,
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a documented module.

    A name is kept in the module after its first use. Submodules are imported by their first use,
    too: after ``import accel``, ``accel.utils.set_seed(0)`` works.
    """
    names = homes(documented)

    def get(name: str) -> object:
        module = sys.modules[documented]
        if name in names:
            home, attribute = names[name]
            value = getattr(importlib.import_module(home), attribute)
        elif not name.startswith("_") and _is_submodule(module, name):
            value = importlib.import_module(f"{documented}.{name}")
        else:
            raise AttributeError(f"module {documented!r} has no attribute {name!r}")
        setattr(module, name, value)
        return value

    return list(names), get, lambda: sorted({*vars(sys.modules[documented]), *names})


def _is_submodule(module: ModuleType, name: str) -> bool:
    return hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}") is not None


def install() -> None:
    """Put the documented modules that have no file into ``sys.modules``."""
    for documented in EXPORTS:
        if documented not in FILES and documented not in sys.modules:
            module = module_from_spec(ModuleSpec(documented, None))
            module.__doc__ = "Names of other modules, at their documented path."
            names = ("__all__", "__getattr__", "__dir__")
            vars(module).update(zip(names, lazy(documented), strict=True))
            sys.modules[documented] = module
