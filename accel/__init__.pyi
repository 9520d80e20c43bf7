# The table of public names and their modules: type checkers read it, and `accel._lazy` at run time.
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
from accel.config.parallelism import ParallelismConfig as ParallelismConfig
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
from accel.inference import prepare_pippy as prepare_pippy
from accel.large.device_map import infer_auto_device_map as infer_auto_device_map
from accel.large.dispatch import cpu_offload as cpu_offload
from accel.large.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
from accel.large.dispatch import disk_offload as disk_offload
from accel.large.dispatch import dispatch_model as dispatch_model
from accel.large.empty_weights import init_empty_weights as init_empty_weights
from accel.large.empty_weights import init_on_device as init_on_device
from accel.large.load import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accel.launchers import debug_launcher as debug_launcher
from accel.launchers import notebook_launcher as notebook_launcher
from accel.local_sgd import LocalSGD as LocalSGD
from accel.memory import find_executable_batch_size as find_executable_batch_size
from accel.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel.rng import synchronize_rng_states as synchronize_rng_states
from accel.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accel.state import AcceleratorState as AcceleratorState
from accel.state import GradientState as GradientState
from accel.state import PartialState as PartialState

__version__: str
__all__: list[str]
