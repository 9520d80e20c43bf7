# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.config.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from accel.config.deepspeed import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from accel.config.fp8 import AORecipeKwargs as AORecipeKwargs
from accel.config.fp8 import FP8RecipeKwargs as FP8RecipeKwargs
from accel.config.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accel.config.fp8 import TERecipeKwargs as TERecipeKwargs
from accel.config.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel.config.fsdp import get_module_class_from_name as get_module_class_from_name
from accel.config.handlers import AutocastKwargs as AutocastKwargs
from accel.config.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel.config.handlers import GradScalerKwargs as GradScalerKwargs
from accel.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel.config.handlers import KwargsHandler as KwargsHandler
from accel.config.handlers import ProfileKwargs as ProfileKwargs
from accel.config.megatron import MegatronLMPlugin as MegatronLMPlugin
from accel.config.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from accel.config.tensor_parallel import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accel.config.training import DataLoaderConfiguration as DataLoaderConfiguration
from accel.config.training import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel.config.training import ProjectConfiguration as ProjectConfiguration
from accel.config.training import TorchDynamoPlugin as TorchDynamoPlugin
from accel.machine.enums import BaseEnum as BaseEnum
from accel.machine.enums import ComputeEnvironment as ComputeEnvironment
from accel.machine.enums import CustomDtype as CustomDtype
from accel.machine.enums import DDPCommunicationHookType as DDPCommunicationHookType
from accel.machine.enums import DistributedType as DistributedType
from accel.machine.enums import DynamoBackend as DynamoBackend
from accel.machine.enums import FP8BackendType as FP8BackendType
from accel.machine.enums import LoggerType as LoggerType
from accel.machine.enums import PrecisionType as PrecisionType
from accel.machine.enums import RNGType as RNGType
from accel.machine.enums import SageMakerDistributedType as SageMakerDistributedType

__all__: list[str]
