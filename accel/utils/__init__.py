"""Functions and classes of the documented `utils`: re-exports of the working modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel._lazy import attribute

if TYPE_CHECKING:
    from accel.checkpoint.export import save as save
    from accel.checkpoint.load_weights import load_checkpoint_in_model as load_checkpoint_in_model
    from accel.config.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
    from accel.config.deepspeed_json import HfDeepSpeedConfig as HfDeepSpeedConfig
    from accel.config.deepspeed_plugins import (
        get_active_deepspeed_plugin as get_active_deepspeed_plugin,
    )
    from accel.config.fp8 import AORecipeKwargs as AORecipeKwargs
    from accel.config.fp8 import FP8RecipeKwargs as FP8RecipeKwargs
    from accel.config.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs
    from accel.config.fp8 import TERecipeKwargs as TERecipeKwargs
    from accel.config.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel.config.handlers import AutocastKwargs as AutocastKwargs
    from accel.config.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel.config.handlers import GradScalerKwargs as GradScalerKwargs
    from accel.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel.config.handlers import KwargsHandler as KwargsHandler
    from accel.config.handlers import ProfileKwargs as ProfileKwargs
    from accel.config.tensor_parallel import TorchTensorParallelPlugin as TorchTensorParallelPlugin
    from accel.config.training import DataLoaderConfiguration as DataLoaderConfiguration
    from accel.config.training import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel.config.training import ProjectConfiguration as ProjectConfiguration
    from accel.config.training import TorchDynamoPlugin as TorchDynamoPlugin
    from accel.enums import BaseEnum as BaseEnum
    from accel.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from accel.enums import DistributedType as DistributedType
    from accel.enums import DynamoBackend as DynamoBackend
    from accel.enums import LoggerType as LoggerType
    from accel.enums import PrecisionType as PrecisionType
    from accel.enums import RNGType as RNGType
    from accel.errors import DistributedOperationException as DistributedOperationException
    from accel.imports import compare_versions as compare_versions
    from accel.imports import is_bf16_available as is_bf16_available
    from accel.imports import is_cuda_available as is_cuda_available
    from accel.imports import is_mps_available as is_mps_available
    from accel.imports import is_rich_available as is_rich_available
    from accel.imports import is_tensorboard_available as is_tensorboard_available
    from accel.imports import is_torch_version as is_torch_version
    from accel.imports import is_torch_xla_available as is_torch_xla_available
    from accel.imports import is_torchdata_available as is_torchdata_available
    from accel.imports import is_xpu_available as is_xpu_available
    from accel.memory import clear_device_cache as clear_device_cache
    from accel.memory import find_executable_batch_size as find_executable_batch_size
    from accel.memory import release_memory as release_memory
    from accel.memory import should_reduce_batch_size as should_reduce_batch_size
    from accel.ops import broadcast as broadcast
    from accel.ops import broadcast_object_list as broadcast_object_list
    from accel.ops import concatenate as concatenate
    from accel.ops import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel.ops import convert_to_fp32 as convert_to_fp32
    from accel.ops import find_batch_size as find_batch_size
    from accel.ops import gather as gather
    from accel.ops import gather_object as gather_object
    from accel.ops import pad_across_processes as pad_across_processes
    from accel.ops import reduce as reduce
    from accel.ops import send_to_device as send_to_device
    from accel.ops import slice_tensors as slice_tensors
    from accel.ops import wait_for_everyone as wait_for_everyone
    from accel.rng import set_seed as set_seed
    from accel.rng import synchronize_rng_state as synchronize_rng_state
    from accel.rng import synchronize_rng_states as synchronize_rng_states
    from accel.strategies.deepspeed.wrappers import DummyOptim as DummyOptim
    from accel.strategies.deepspeed.wrappers import DummyScheduler as DummyScheduler
    from accel.tree import honor_type as honor_type
    from accel.tree import is_namedtuple as is_namedtuple
    from accel.tree import recursively_apply as recursively_apply
    from accel.wrapping import extract_model_from_parallel as extract_model_from_parallel

# Where each name is; its module is imported when the name is first used.
_PLACES = {
    "AORecipeKwargs": "accel.config.fp8",
    "AutocastKwargs": "accel.config.handlers",
    "BaseEnum": "accel.enums",
    "DDPCommunicationHookType": "accel.enums",
    "DataLoaderConfiguration": "accel.config.training",
    "DeepSpeedPlugin": "accel.config.deepspeed",
    "DistributedDataParallelKwargs": "accel.config.handlers",
    "DistributedOperationException": "accel.errors",
    "DistributedType": "accel.enums",
    "DummyOptim": "accel.strategies.deepspeed.wrappers",
    "DummyScheduler": "accel.strategies.deepspeed.wrappers",
    "DynamoBackend": "accel.enums",
    "FP8RecipeKwargs": "accel.config.fp8",
    "FullyShardedDataParallelPlugin": "accel.config.fsdp",
    "GradScalerKwargs": "accel.config.handlers",
    "GradientAccumulationPlugin": "accel.config.training",
    "HfDeepSpeedConfig": "accel.config.deepspeed_json",
    "InitProcessGroupKwargs": "accel.config.handlers",
    "KwargsHandler": "accel.config.handlers",
    "LoggerType": "accel.enums",
    "MSAMPRecipeKwargs": "accel.config.fp8",
    "PrecisionType": "accel.enums",
    "ProfileKwargs": "accel.config.handlers",
    "ProjectConfiguration": "accel.config.training",
    "RNGType": "accel.enums",
    "TERecipeKwargs": "accel.config.fp8",
    "TorchDynamoPlugin": "accel.config.training",
    "TorchTensorParallelPlugin": "accel.config.tensor_parallel",
    "broadcast": "accel.ops",
    "broadcast_object_list": "accel.ops",
    "clear_device_cache": "accel.memory",
    "compare_versions": "accel.imports",
    "concatenate": "accel.ops",
    "convert_outputs_to_fp32": "accel.ops",
    "convert_to_fp32": "accel.ops",
    "extract_model_from_parallel": "accel.wrapping",
    "find_batch_size": "accel.ops",
    "find_executable_batch_size": "accel.memory",
    "gather": "accel.ops",
    "gather_object": "accel.ops",
    "get_active_deepspeed_plugin": "accel.config.deepspeed_plugins",
    "honor_type": "accel.tree",
    "is_bf16_available": "accel.imports",
    "is_cuda_available": "accel.imports",
    "is_mps_available": "accel.imports",
    "is_namedtuple": "accel.tree",
    "is_rich_available": "accel.imports",
    "is_tensorboard_available": "accel.imports",
    "is_torch_version": "accel.imports",
    "is_torch_xla_available": "accel.imports",
    "is_torchdata_available": "accel.imports",
    "is_xpu_available": "accel.imports",
    "load_checkpoint_in_model": "accel.checkpoint.load_weights",
    "pad_across_processes": "accel.ops",
    "recursively_apply": "accel.tree",
    "reduce": "accel.ops",
    "release_memory": "accel.memory",
    "save": "accel.checkpoint.export",
    "send_to_device": "accel.ops",
    "set_seed": "accel.rng",
    "should_reduce_batch_size": "accel.memory",
    "slice_tensors": "accel.ops",
    "synchronize_rng_state": "accel.rng",
    "synchronize_rng_states": "accel.rng",
    "wait_for_everyone": "accel.ops",
}

if not TYPE_CHECKING:  # type checkers know the names, and only these, from the imports above
    __all__ = list(_PLACES)

    def __getattr__(name: str) -> Any:
        return attribute(__name__, _PLACES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
