"""E1: documented names are importable from their documented paths, with documented signatures."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import pickle
import subprocess
from pathlib import Path
from unittest import mock

import pytest

import accel
import accel.utils
import runner
from accel import Accelerator
from accel._exports import EXPORTS
from tests.helpers import ROOT, python
from tests.stubs import stubs

# Paths as in the documentation, the package's name apart.
DOCUMENTED = {
    "accel": """
        Accelerator AcceleratorState GradientState PartialState DistributedType AutocastKwargs
        DistributedDataParallelKwargs FP8RecipeKwargs GradScalerKwargs InitProcessGroupKwargs
        KwargsHandler ProfileKwargs DataLoaderConfiguration GradientAccumulationPlugin
        ProjectConfiguration TorchDynamoPlugin skip_first_batches prepare_data_loader
        synchronize_rng_states find_executable_batch_size DeepSpeedPlugin
        FullyShardedDataParallelPlugin TorchTensorParallelPlugin
        notebook_launcher debug_launcher
    """,
    "accel.launchers": "notebook_launcher debug_launcher",
    "accel.utils.environment": """
        clear_environment override_numa_affinity patch_environment purge_accelerate_environment
        set_numa_affinity str_to_bool parse_flag_from_env parse_choice_from_env get_int_from_env
    """,
    "accel.utils.other": "convert_bytes is_port_in_use merge_dicts",
    "accel.utils.dataclasses": "ComputeEnvironment CustomDtype SageMakerDistributedType",
    "accel.utils.fsdp_utils": "merge_fsdp_weights",
    "accel.accelerator": "Accelerator",
    "accel.state": "AcceleratorState GradientState PartialState is_initialized",
    "accel.optimizer": "AcceleratedOptimizer",
    "accel.scheduler": "AcceleratedScheduler",
    "accel.data_loader": """
        prepare_data_loader skip_first_batches DataLoaderShard DataLoaderDispatcher
        BatchSamplerShard IterableDatasetShard
    """,
    "accel.tracking": "GeneralTracker TensorBoardTracker",
    "accel.logging": "get_logger",
    "accel.utils": """
        DistributedType LoggerType PrecisionType RNGType DynamoBackend DDPCommunicationHookType
        AutocastKwargs DistributedDataParallelKwargs FP8RecipeKwargs GradScalerKwargs
        InitProcessGroupKwargs KwargsHandler ProfileKwargs DataLoaderConfiguration
        GradientAccumulationPlugin ProjectConfiguration TorchDynamoPlugin
        DeepSpeedPlugin DummyOptim DummyScheduler HfDeepSpeedConfig get_active_deepspeed_plugin
        FullyShardedDataParallelPlugin TorchTensorParallelPlugin
        broadcast broadcast_object_list concatenate gather gather_object pad_across_processes reduce
        send_to_device slice_tensors wait_for_everyone convert_to_fp32 recursively_apply
        is_bf16_available is_torch_version extract_model_from_parallel set_seed
        synchronize_rng_state synchronize_rng_states release_memory
        patch_environment clear_environment purge_accelerate_environment set_numa_affinity
        write_basic_config merge_fsdp_weights ComputeEnvironment SageMakerDistributedType
        str_to_bool parse_flag_from_env parse_choice_from_env get_int_from_env merge_dicts
        convert_bytes is_port_in_use PrepareForLaunch
    """,
}
# The newest documented parameters, in order, and the defaults that the documentation gives.
SIGNATURES = {
    "Accelerator": {
        "device_placement": True,
        "split_batches": None,
        "mixed_precision": None,
        "gradient_accumulation_steps": 1,
        "cpu": False,
        "dataloader_config": None,
        "deepspeed_plugin": None,
        "fsdp_plugin": None,
        "megatron_lm_plugin": None,
        "rng_types": None,
        "log_with": None,
        "project_dir": None,
        "project_config": None,
        "gradient_accumulation_plugin": None,
        "step_scheduler_with_optimizer": True,
        "kwargs_handlers": None,
        "dynamo_backend": None,
        "deepspeed_plugins": None,
    },
    "accumulate": {"*models": inspect.Parameter.empty},
    "autocast": {"autocast_handler": None},
    "backward": {"loss": inspect.Parameter.empty},
    "check_trigger": {},
    "clear": {"*objects": inspect.Parameter.empty},
    "clip_grad_norm_": {
        "parameters": inspect.Parameter.empty,
        "max_norm": inspect.Parameter.empty,
        "norm_type": 2,
    },
    "clip_grad_value_": {
        "parameters": inspect.Parameter.empty,
        "clip_value": inspect.Parameter.empty,
    },
    "end_training": {},
    "free_memory": {"*objects": inspect.Parameter.empty},
    "gather": {"tensor": inspect.Parameter.empty},
    "gather_for_metrics": {"input_data": inspect.Parameter.empty, "use_gather_object": False},
    "get_state_dict": {"model": inspect.Parameter.empty, "unwrap": True},
    "get_tracker": {"name": inspect.Parameter.empty, "unwrap": False},
    "init_trackers": {
        "project_name": inspect.Parameter.empty,
        "config": None,
        "init_kwargs": None,
    },
    "join_uneven_inputs": {"joinables": inspect.Parameter.empty, "even_batches": None},
    "load_state": {"input_dir": None},
    "local_main_process_first": {},
    "log": {"values": inspect.Parameter.empty, "step": None, "log_kwargs": None},
    "lomo_backward": {
        "loss": inspect.Parameter.empty,
        "learning_rate": inspect.Parameter.empty,
    },
    "main_process_first": {},
    "no_sync": {"model": None},
    "on_last_process": {"function": None},
    "on_local_main_process": {"function": None},
    "on_local_process": {"function": None, "local_process_index": None},
    "on_main_process": {"function": None},
    "on_process": {"function": None, "process_index": None},
    "pad_across_processes": {
        "tensor": inspect.Parameter.empty,
        "dim": 0,
        "pad_index": 0,
        "pad_first": False,
    },
    "prepare": {"*args": inspect.Parameter.empty, "device_placement": None},
    "prepare_data_loader": {
        "data_loader": inspect.Parameter.empty,
        "device_placement": None,
        "slice_fn_for_dispatch": None,
    },
    "prepare_model": {
        "model": inspect.Parameter.empty,
        "device_placement": None,
        "evaluation_mode": False,
    },
    "prepare_optimizer": {"optimizer": inspect.Parameter.empty, "device_placement": None},
    "prepare_scheduler": {"scheduler": inspect.Parameter.empty},
    "print": {},
    "profile": {"profile_handler": None},
    "reduce": {"tensor": inspect.Parameter.empty, "reduction": "sum", "scale": 1.0},
    "register_for_checkpointing": {"*objects": inspect.Parameter.empty},
    "register_load_state_pre_hook": {"hook": inspect.Parameter.empty},
    "register_save_state_pre_hook": {"hook": inspect.Parameter.empty},
    "save": {
        "obj": inspect.Parameter.empty,
        "f": inspect.Parameter.empty,
        "safe_serialization": False,
    },
    "save_model": {
        "model": inspect.Parameter.empty,
        "save_directory": inspect.Parameter.empty,
        "max_shard_size": "10GB",
        "safe_serialization": True,
    },
    "save_state": {"output_dir": None, "safe_serialization": True},
    "set_trigger": {},
    "skip_first_batches": {"dataloader": inspect.Parameter.empty, "num_batches": 0},
    "split_between_processes": {"inputs": inspect.Parameter.empty, "apply_padding": False},
    "trigger_sync_in_backward": {"model": inspect.Parameter.empty},
    "unscale_gradients": {"optimizer": None},
    "unwrap_model": {"model": inspect.Parameter.empty, "keep_fp32_wrapper": True},
    "verify_device_map": {"model": inspect.Parameter.empty},
    "wait_for_everyone": {},
}
PROPERTIES = """
    device distributed_type local_process_index mixed_precision num_processes
    optimizer_step_was_skipped process_index state sync_gradients use_distributed is_main_process
    is_local_main_process is_last_process gradient_accumulation_steps project_dir logging_dir
"""


@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_names_are_where_they_should_be(path: str) -> None:
    module = importlib.import_module(path)
    missing = [name for name in DOCUMENTED[path].split() if not hasattr(module, name)]
    assert missing == []


def given(function: object) -> dict[str, object]:
    """Return the parameters by name, stars included, without `self` and `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*"}
    return {
        stars.get(parameter.kind, "") + parameter.name: parameter.default
        for parameter in parameters
        if parameter.name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_documented_ones(name: str) -> None:
    """Parameters of ours may follow, by keyword."""
    found = given(Accelerator if name == "Accelerator" else getattr(Accelerator, name))
    documented = SIGNATURES[name]
    assert dict(list(found.items())[: len(documented)]) == documented or (
        name == "print" and list(found) == ["*args"]
    )


def test_documented_attributes_exist() -> None:
    accelerator = Accelerator(cpu=True)
    assert [name for name in PROPERTIES.split() if not hasattr(accelerator, name)] == []


@pytest.mark.parametrize("path", sorted({*EXPORTS, "runner"} - {"accel.utils.constants"}))
def test_every_name_of_a_documented_module_is_there(path: str) -> None:
    module = importlib.import_module(path)
    assert set(module.__all__) <= set(dir(module))
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def test_type_checkers_are_told_of_the_same_names() -> None:
    """Mended by ``python -m tests.stubs``."""
    assert {path: path.read_text() for path in stubs()} == stubs()
    lines = ast.parse(Path(runner.__file__).with_suffix(".pyi").read_text()).body
    told = {
        alias.name: line.module
        for line in lines
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    assert told == runner._HOMES


@pytest.mark.parametrize("path", ["utils", "utils.dataclasses", "utils.tqdm", "state", "hooks"])
def test_a_documented_module_is_there_after_the_import_of_its_package(path: str) -> None:
    """In a process of its own: another test may have imported the module."""
    names = {"utils.tqdm": "run.progress.tqdm"}  # the function, as documented
    home = names.get(path, path)
    code = f"import accel, accel.{path}, accel.{home.rpartition('.')[0] or path}\n"
    code += f"assert accel.{path} is accel.{home}"
    subprocess.run(python("-c", code), check=True, timeout=120)


def test_a_documented_module_is_a_module() -> None:
    """Its names can be patched, and what pickles by them is found again."""
    with mock.patch("accel.utils.other.save", 3):
        assert importlib.import_module("accel.utils.other").save == 3
    assert accel.utils.other.save is accel.utils.save
    assert pickle.loads(b"caccel.utils.dataclasses\nProjectConfiguration\n.") is (
        accel.utils.ProjectConfiguration
    )
    assert importlib.util.find_spec("accel.hooks") is not None


CHECKED = """
import accel
from accel.hooks import ModelHook
from accel.utils.dataclasses import ProjectConfiguration
ModelHook().detach_hook()
accel.utils.set_seed(0)
accel.utils.is_torch_tensor(0)
accel.utils.dataclasses.ProjectConfiguration(nothing=1)
accel.state.PartialState().num_processes
"""


@pytest.mark.slow  # minutes: the checker reads torch
def test_a_type_checker_knows_the_documented_modules(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="the extra `check` installs it")
    (tmp_path / "script.py").write_text(CHECKED)
    command = python("-m", "mypy", "--config-file=", str(tmp_path / "script.py"))
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=tmp_path, env=environment
    )
    first, second, count = answer.stdout.splitlines()
    assert 'Missing positional argument "module" in call to "detach_hook"' in first
    assert 'Unexpected keyword argument "nothing" for "ProjectConfiguration"' in second
    assert "Found 2 errors" in count


def test_a_submodule_of_the_runner_is_imported_without_the_engine() -> None:
    probe = "import sys; from runner import cli, exit_codes; print('accel' in sys.modules)"
    command = python("-c", probe)
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert answer.stdout.strip() == "False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'accel' has no attribute 'Acelerator'"):
        accel.Acelerator  # noqa: B018
    for name in ("_lazy_", "__wrapped__"):
        assert not hasattr(accel, name)
    assert {"Accelerator", "PartialState"} <= set(dir(accel))


def test_importing_the_package_imports_neither_torch_nor_options() -> None:
    probe = (
        "import sys, accel, accel.utils, accel.config.handlers, accel.config.training\n"
        "heavy = ['torch', 'numpy', 'deepspeed', 'tensorboard', 'rich', 'safetensors', 'yaml']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    answer = subprocess.run(
        python("-c", probe),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[1],
    )
    assert answer.stdout.strip() == "[]", answer.stderr
