# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.checkpoint.export import save as save
from accel.checkpoint.serialization import load as load
from accel.comm.ops import ConvertOutputsToFp32 as ConvertOutputsToFp32
from accel.comm.ops import broadcast as broadcast
from accel.comm.ops import broadcast_object_list as broadcast_object_list
from accel.comm.ops import concatenate as concatenate
from accel.comm.ops import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accel.comm.ops import convert_to_fp32 as convert_to_fp32
from accel.comm.ops import find_batch_size as find_batch_size
from accel.comm.ops import gather as gather
from accel.comm.ops import gather_object as gather_object
from accel.comm.ops import listify as listify
from accel.comm.ops import pad_across_processes as pad_across_processes
from accel.comm.ops import reduce as reduce
from accel.comm.ops import send_to_device as send_to_device
from accel.comm.ops import slice_tensors as slice_tensors
from accel.comm.ops import wait_for_everyone as wait_for_everyone
from accel.comm.rng import set_seed as set_seed
from accel.comm.rng import synchronize_rng_state as synchronize_rng_state
from accel.comm.rng import synchronize_rng_states as synchronize_rng_states
from accel.commands.launch_config import write_basic_config as write_basic_config
from accel.config.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from accel.config.deepspeed import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from accel.config.deepspeed_json import HfDeepSpeedConfig as HfDeepSpeedConfig
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
from accel.config.parallelism import ParallelismConfig as ParallelismConfig
from accel.config.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from accel.config.tensor_parallel import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accel.config.training import DataLoaderConfiguration as DataLoaderConfiguration
from accel.config.training import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel.config.training import ProjectConfiguration as ProjectConfiguration
from accel.config.training import TorchDynamoPlugin as TorchDynamoPlugin
from accel.launchers import PrepareForLaunch as PrepareForLaunch
from accel.launchers import is_port_in_use as is_port_in_use
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
from accel.machine.env import clear_environment as clear_environment
from accel.machine.env import get_int_from_env as get_int_from_env
from accel.machine.env import parse_choice_from_env as parse_choice_from_env
from accel.machine.env import parse_flag_from_env as parse_flag_from_env
from accel.machine.env import patch_environment as patch_environment
from accel.machine.env import purge_accelerate_environment as purge_accelerate_environment
from accel.machine.env import str_to_bool as str_to_bool
from accel.machine.errors import DistributedOperationException as DistributedOperationException
from accel.machine.imports import compare_versions as compare_versions
from accel.machine.imports import install_xla as install_xla
from accel.machine.imports import is_4bit_bnb_available as is_4bit_bnb_available
from accel.machine.imports import is_8bit_bnb_available as is_8bit_bnb_available
from accel.machine.imports import is_aim_available as is_aim_available
from accel.machine.imports import is_amdsmi_available as is_amdsmi_available
from accel.machine.imports import is_bf16_available as is_bf16_available
from accel.machine.imports import (
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
)
from accel.machine.imports import is_bnb_available as is_bnb_available
from accel.machine.imports import is_boto3_available as is_boto3_available
from accel.machine.imports import is_ccl_available as is_ccl_available
from accel.machine.imports import is_clearml_available as is_clearml_available
from accel.machine.imports import is_comet_ml_available as is_comet_ml_available
from accel.machine.imports import is_cuda_available as is_cuda_available
from accel.machine.imports import is_datasets_available as is_datasets_available
from accel.machine.imports import is_deepspeed_available as is_deepspeed_available
from accel.machine.imports import is_dvclive_available as is_dvclive_available
from accel.machine.imports import is_fp16_available as is_fp16_available
from accel.machine.imports import is_fp8_available as is_fp8_available
from accel.machine.imports import is_hpu_available as is_hpu_available
from accel.machine.imports import is_import_timer_available as is_import_timer_available
from accel.machine.imports import is_ipex_available as is_ipex_available
from accel.machine.imports import is_lomo_available as is_lomo_available
from accel.machine.imports import is_matplotlib_available as is_matplotlib_available
from accel.machine.imports import is_megatron_lm_available as is_megatron_lm_available
from accel.machine.imports import is_mlflow_available as is_mlflow_available
from accel.machine.imports import is_mlu_available as is_mlu_available
from accel.machine.imports import is_mps_available as is_mps_available
from accel.machine.imports import is_msamp_available as is_msamp_available
from accel.machine.imports import is_musa_available as is_musa_available
from accel.machine.imports import is_neuron_available as is_neuron_available
from accel.machine.imports import is_npu_available as is_npu_available
from accel.machine.imports import is_pandas_available as is_pandas_available
from accel.machine.imports import is_peft_available as is_peft_available
from accel.machine.imports import is_pippy_available as is_pippy_available
from accel.machine.imports import is_pynvml_available as is_pynvml_available
from accel.machine.imports import is_pytest_available as is_pytest_available
from accel.machine.imports import is_rich_available as is_rich_available
from accel.machine.imports import is_rocm_available as is_rocm_available
from accel.machine.imports import is_sagemaker_available as is_sagemaker_available
from accel.machine.imports import is_schedulefree_available as is_schedulefree_available
from accel.machine.imports import is_sdaa_available as is_sdaa_available
from accel.machine.imports import is_swanlab_available as is_swanlab_available
from accel.machine.imports import is_tensorboard_available as is_tensorboard_available
from accel.machine.imports import is_timm_available as is_timm_available
from accel.machine.imports import is_torch_version as is_torch_version
from accel.machine.imports import is_torch_xla_available as is_torch_xla_available
from accel.machine.imports import is_torchao_available as is_torchao_available
from accel.machine.imports import is_torchdata_available as is_torchdata_available
from accel.machine.imports import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from accel.machine.imports import is_torchvision_available as is_torchvision_available
from accel.machine.imports import is_tqdm_available as is_tqdm_available
from accel.machine.imports import is_trackio_available as is_trackio_available
from accel.machine.imports import is_transformer_engine_available as is_transformer_engine_available
from accel.machine.imports import (
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
)
from accel.machine.imports import is_transformers_available as is_transformers_available
from accel.machine.imports import is_triton_available as is_triton_available
from accel.machine.imports import is_wandb_available as is_wandb_available
from accel.machine.imports import is_weights_only_available as is_weights_only_available
from accel.machine.imports import is_xccl_available as is_xccl_available
from accel.machine.imports import is_xpu_available as is_xpu_available
from accel.machine.memory import clear_device_cache as clear_device_cache
from accel.machine.memory import find_executable_batch_size as find_executable_batch_size
from accel.machine.memory import release_memory as release_memory
from accel.machine.memory import should_reduce_batch_size as should_reduce_batch_size
from accel.machine.numa import override_numa_affinity as override_numa_affinity
from accel.machine.numa import set_numa_affinity as set_numa_affinity
from accel.machine.tree import honor_type as honor_type
from accel.machine.tree import is_namedtuple as is_namedtuple
from accel.machine.tree import is_tensor as is_tensor
from accel.machine.tree import merge_dicts as merge_dicts
from accel.machine.tree import recursively_apply as recursively_apply
from accel.precision.amp import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accel.precision.transformer_engine import apply_fp8_autowrap as apply_fp8_autowrap
from accel.precision.transformer_engine import contextual_fp8_autocast as contextual_fp8_autocast
from accel.precision.transformer_engine import convert_model as convert_model
from accel.precision.transformer_engine import (
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from accel.precision.wrapping import extract_model_from_parallel as extract_model_from_parallel
from accel.precision.wrapping import get_module_children_bottom_up as get_module_children_bottom_up
from accel.precision.wrapping import is_compiled_module as is_compiled_module
from accel.precision.wrapping import is_peft_model as is_peft_model
from accel.run.progress import tqdm as tqdm
from accel.strategies.context_parallel import shift_labels as shift_labels
from accel.strategies.deepspeed.wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accel.strategies.deepspeed.wrappers import (
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
)
from accel.strategies.deepspeed.wrappers import (
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
from accel.strategies.deepspeed.wrappers import DummyOptim as DummyOptim
from accel.strategies.deepspeed.wrappers import DummyScheduler as DummyScheduler
from accel.strategies.megatron.placeholders import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
)
from accel.strategies.megatron.placeholders import (
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
)
from accel.strategies.megatron.steps import AbstractTrainStep as AbstractTrainStep
from accel.strategies.megatron.steps import BertTrainStep as BertTrainStep
from accel.strategies.megatron.steps import GPTTrainStep as GPTTrainStep
from accel.strategies.megatron.steps import T5TrainStep as T5TrainStep
from accel.strategies.megatron.steps import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accel.strategies.mesh.gradients import get_grad_scaler as get_grad_scaler
from accel.strategies.mesh.utilities import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accel.strategies.mesh.utilities import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accel.strategies.mesh.utilities import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accel.strategies.mesh.utilities import fsdp2_prepare_model as fsdp2_prepare_model
from accel.strategies.mesh.utilities import (
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accel.strategies.mesh.utilities import (
    get_parameters_from_modules as get_parameters_from_modules,
)
from accel.strategies.mesh.utilities import load_fsdp_model as load_fsdp_model
from accel.strategies.mesh.utilities import load_fsdp_optimizer as load_fsdp_optimizer
from accel.strategies.mesh.utilities import save_fsdp_model as save_fsdp_model
from accel.strategies.mesh.utilities import save_fsdp_optimizer as save_fsdp_optimizer
from accel.utils import constants as constants
from accel.utils import dataclasses as dataclasses
from accel.utils import deepspeed as deepspeed
from accel.utils import environment as environment
from accel.utils import fsdp_utils as fsdp_utils
from accel.utils import imports as imports
from accel.utils import megatron_lm as megatron_lm
from accel.utils import memory as memory
from accel.utils import modeling as modeling
from accel.utils import offload as offload
from accel.utils import operations as operations
from accel.utils import other as other
from accel.utils import random as random
from accel.utils import versions as versions
from accel.utils.constants import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
from accel.utils.constants import FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH
from accel.utils.constants import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accel.utils.constants import FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY
from accel.utils.constants import FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE
from accel.utils.constants import MODEL_NAME as MODEL_NAME
from accel.utils.constants import OPTIMIZER_NAME as OPTIMIZER_NAME
from accel.utils.constants import RNG_STATE_NAME as RNG_STATE_NAME
from accel.utils.constants import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from accel.utils.constants import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from accel.utils.constants import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accel.utils.constants import SAMPLER_NAME as SAMPLER_NAME
from accel.utils.constants import SCALER_NAME as SCALER_NAME
from accel.utils.constants import SCHEDULER_NAME as SCHEDULER_NAME
from accel.utils.constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accel.utils.constants import WEIGHTS_NAME as WEIGHTS_NAME
from accel.weights.device_map import check_device_map as check_device_map
from accel.weights.device_map import clean_device_map as clean_device_map
from accel.weights.device_map import get_balanced_memory as get_balanced_memory
from accel.weights.device_map import get_max_memory as get_max_memory
from accel.weights.device_map import infer_auto_device_map as infer_auto_device_map
from accel.weights.files import merge_weights as merge_weights
from accel.weights.folder import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel.weights.folder import PrefixedDataset as PrefixedDataset
from accel.weights.folder import extract_submodules_state_dict as extract_submodules_state_dict
from accel.weights.folder import load_offloaded_weight as load_offloaded_weight
from accel.weights.folder import offload_state_dict as offload_state_dict
from accel.weights.folder import offload_weight as offload_weight
from accel.weights.folder import save_offload_index as save_offload_index
from accel.weights.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel.weights.load import load_state_dict as load_state_dict
from accel.weights.quantize import load_and_quantize_model as load_and_quantize_model
from accel.weights.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel.weights.sizes import compute_module_sizes as compute_module_sizes
from accel.weights.sizes import compute_module_total_buffer_size as compute_module_total_buffer_size
from accel.weights.sizes import convert_bytes as convert_bytes
from accel.weights.sizes import convert_file_size_to_int as convert_file_size_to_int
from accel.weights.sizes import dtype_byte_size as dtype_byte_size
from accel.weights.sizes import get_max_layer_size as get_max_layer_size
from accel.weights.sizes import get_module_leaves as get_module_leaves
from accel.weights.state import align_module_device as align_module_device
from accel.weights.state import get_state_dict_from_offload as get_state_dict_from_offload
from accel.weights.state import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from accel.weights.state import has_offloaded_params as has_offloaded_params
from accel.weights.state import load_offloaded_weights as load_offloaded_weights
from accel.weights.tensors import check_device_same as check_device_same
from accel.weights.tensors import check_tied_parameters_in_config as check_tied_parameters_in_config
from accel.weights.tensors import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from accel.weights.tensors import find_tied_parameters as find_tied_parameters
from accel.weights.tensors import get_non_persistent_buffers as get_non_persistent_buffers
from accel.weights.tensors import id_tensor_storage as id_tensor_storage
from accel.weights.tensors import named_module_tensors as named_module_tensors
from accel.weights.tensors import retie_parameters as retie_parameters
from accel.weights.tensors import set_module_tensor_to_device as set_module_tensor_to_device

__all__: list[str]
is_torch_tensor = is_tensor
merge_fsdp_weights = merge_weights
