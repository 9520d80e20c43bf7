"""A training engine: one loop for any device and any number of processes.

Importing this package imports neither torch nor an optional package; using a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel._lazy import attribute

if TYPE_CHECKING:
    from accel.accelerator import Accelerator as Accelerator
    from accel.checkpoint.load_weights import load_checkpoint_in_model as load_checkpoint_in_model
    from accel.config.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
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
    from accel.data.prepare import prepare_data_loader as prepare_data_loader
    from accel.data.prepare import skip_first_batches as skip_first_batches
    from accel.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from accel.enums import DistributedType as DistributedType
    from accel.imports import is_rich_available as is_rich_available
    from accel.memory import find_executable_batch_size as find_executable_batch_size
    from accel.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from accel.rng import synchronize_rng_states as synchronize_rng_states
    from accel.scheduler import AcceleratedScheduler as AcceleratedScheduler
    from accel.state import AcceleratorState as AcceleratorState
    from accel.state import GradientState as GradientState
    from accel.state import PartialState as PartialState

# Where each name is; its module is imported when the name is first used.
_PLACES = {
    "AORecipeKwargs": "accel.config.fp8",
    "AcceleratedOptimizer": "accel.optimizer",
    "AcceleratedScheduler": "accel.scheduler",
    "Accelerator": "accel.accelerator",
    "AcceleratorState": "accel.state",
    "AutocastKwargs": "accel.config.handlers",
    "DDPCommunicationHookType": "accel.enums",
    "DataLoaderConfiguration": "accel.config.training",
    "DeepSpeedPlugin": "accel.config.deepspeed",
    "DistributedDataParallelKwargs": "accel.config.handlers",
    "DistributedType": "accel.enums",
    "FP8RecipeKwargs": "accel.config.fp8",
    "FullyShardedDataParallelPlugin": "accel.config.fsdp",
    "GradScalerKwargs": "accel.config.handlers",
    "GradientAccumulationPlugin": "accel.config.training",
    "GradientState": "accel.state",
    "InitProcessGroupKwargs": "accel.config.handlers",
    "KwargsHandler": "accel.config.handlers",
    "MSAMPRecipeKwargs": "accel.config.fp8",
    "PartialState": "accel.state",
    "ProfileKwargs": "accel.config.handlers",
    "ProjectConfiguration": "accel.config.training",
    "TERecipeKwargs": "accel.config.fp8",
    "TorchDynamoPlugin": "accel.config.training",
    "TorchTensorParallelPlugin": "accel.config.tensor_parallel",
    "find_executable_batch_size": "accel.memory",
    "is_rich_available": "accel.imports",
    "load_checkpoint_in_model": "accel.checkpoint.load_weights",
    "prepare_data_loader": "accel.data.prepare",
    "skip_first_batches": "accel.data.prepare",
    "synchronize_rng_states": "accel.rng",
}

if not TYPE_CHECKING:  # type checkers know the names, and only these, from the imports above
    __all__ = list(_PLACES)

    def __getattr__(name: str) -> Any:
        return attribute(__name__, _PLACES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
