"""What was decided for a run, as the Accelerator shows it (E1)."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin, share_selection
from accel.config.fp8 import AORecipeKwargs, TERecipeKwargs
from accel.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from accel.config.parallelism import ParallelismConfig
from accel.config.training import DataLoaderConfiguration, ProjectConfiguration
from accel.data.loaders import DataLoaderDispatcher
from accel.machine.enums import FP8BackendType
from accel.machine.errors import ConfigError
from accel.plan.dims import ParallelDims
from tests.helpers import reset_accel, run_distributed

SETTINGS: dict[str, Any] = {
    "split_batches": True,
    "dispatch_batches": True,
    "even_batches": False,
    "use_seedable_sampler": True,
    "non_blocking": True,
    "use_stateful_dataloader": True,
}


def test_the_settings_of_loaders_are_read_and_set() -> None:
    config = DataLoaderConfiguration(**SETTINGS)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    assert accelerator.dataloader_config is config
    for name, value in SETTINGS.items():
        assert getattr(accelerator, name) is value
        setattr(accelerator, name, not value)
        assert getattr(accelerator, name) is getattr(accelerator.dataloader_config, name)
        assert getattr(accelerator, name) is not value
    assert config == DataLoaderConfiguration(**SETTINGS), "the caller's own stays as it was"
    with pytest.raises(ConfigError, match="even_batches=True with dataloader_config"):
        Accelerator(cpu=True, dataloader_config=config, even_batches=True)


def test_generators_and_schedulers_are_set_for_what_is_prepared_later() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]
    data = TensorDataset(torch.zeros(4, 1))
    before = accelerator.prepare(optimizer, schedulers[0], DataLoader(data))
    accelerator.rng_types = ["torch"]
    accelerator.step_scheduler_with_optimizer = False
    assert accelerator.rng_types == ("torch",)
    assert accelerator.step_scheduler_with_optimizer is False
    after = accelerator.prepare(schedulers[1], DataLoader(data))
    assert (before[1].step_with_optimizer, after[0].step_with_optimizer) == (True, False)
    assert after[1].rng_types == ["torch"] != before[2].rng_types
    with pytest.raises(ConfigError, match="rng_types: 'x': each is one of"):
        accelerator.rng_types = ["x"]
    assert accelerator.rng_types == ("torch",)
    assert accelerator.step_scheduler_with_optimizer is False


def test_a_run_without_fp8_says_so() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.fp8_enabled is accelerator.delayed_fp8_autocast is False


def test_a_setting_holds_for_loaders_that_are_prepared_later() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.dispatch_batches = True
    accelerator.even_batches = False
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.zeros(4, 1))))
    assert isinstance(loader, DataLoaderDispatcher)
    assert loader.even_batches is False


def test_what_a_run_of_one_process_shows(tmp_path: Any) -> None:
    project = ProjectConfiguration(str(tmp_path), logging_dir=str(tmp_path / "logs"), iteration=3)
    accelerator = Accelerator(
        cpu=True, project_config=project, step_scheduler_with_optimizer=False, rng_types=["torch"]
    )
    assert accelerator.parallelism_config is None
    assert accelerator.torch_device_mesh is None
    assert accelerator.deepspeed_plugin is None
    assert accelerator.fp8_backend is FP8BackendType.NO
    assert accelerator.fp8_backend == "NO"
    assert not accelerator.is_fsdp2
    assert not accelerator.is_composable_parallelism_enabled
    assert not accelerator.multi_device
    assert accelerator.should_save_model
    assert accelerator.project_configuration is project
    assert accelerator.project_dir == str(tmp_path)
    assert accelerator.logging_dir == str(tmp_path / "logs")
    assert accelerator.save_iteration == 3
    assert accelerator.step_scheduler_with_optimizer is False
    assert accelerator.rng_types == ("torch",)
    assert accelerator.parallel_dims == ParallelDims()
    assert "Num processes: 1" in repr(accelerator)


def test_autocast_is_switched_off() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.autocast():
        assert model.forward.__wrapped__(torch.ones(1, 1)).dtype == torch.bfloat16
    assert accelerator.native_amp
    accelerator.native_amp = False
    assert not accelerator.native_amp
    with accelerator.autocast():
        assert model.forward.__wrapped__(torch.ones(1, 1)).dtype == torch.float32
    with accelerator.autocast(AutocastKwargs(enabled=True)):
        assert torch.is_autocast_enabled("cpu")


def test_sequences_are_not_sharded() -> None:
    accelerator = Accelerator(cpu=True)
    tokens = torch.arange(4)
    with accelerator.maybe_context_parallel([tokens], [0], no_restore_buffers={tokens}):
        assert tokens.tolist() == [0, 1, 2, 3]
    assert accelerator.deepspeed_ulysses_dl_adapter(tokens, None) is tokens


RANKS = (
    *("data_parallel_rank", "data_parallel_shard_rank", "tensor_parallel_rank"),
    *("context_parallel_rank", "pipeline_parallel_rank"),
)


@pytest.mark.parametrize(
    ("rank", "expected", "saves"),
    [(0, (0, 0, 0, 0, 0), True), (3, (0, 1, 1, 0, 0), True), (5, (1, 0, 1, 0, 0), False)],
)
def test_ranks_along_the_axes(rank: int, expected: tuple[int, ...], saves: bool) -> None:
    accelerator = Accelerator(cpu=True)
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, rank=rank)
    accelerator._change(parallel_dims=dims)
    assert tuple(getattr(accelerator, name) for name in RANKS) == expected
    assert accelerator.should_save_model is saves


@pytest.mark.parametrize(("axis", "rank"), [("pp", 1), ("cp", 1)])
def test_ranks_along_axes_of_the_model(axis: str, rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    dims = ParallelDims(**{axis: 2}, rank=rank)
    accelerator._change(parallel_dims=dims)
    found = accelerator.pipeline_parallel_rank, accelerator.context_parallel_rank
    assert found == ((1, 0) if axis == "pp" else (0, 1))
    assert accelerator.should_save_model  # a part of the model that no other process has


def shards() -> tuple[Any, ...]:
    config = ParallelismConfig(dp_shard_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    mesh = accelerator.torch_device_mesh
    assert mesh is not None
    found = (
        accelerator.parallelism_config == config,
        accelerator.is_fsdp2,
        accelerator.is_composable_parallelism_enabled,
        accelerator.multi_device,
        accelerator.should_save_model,
        mesh.mesh_dim_names,
        accelerator.data_parallel_shard_rank,
        accelerator.state.fsdp_plugin.state_dict_type.name,
    )
    accelerator.end_training()
    return found


def test_what_a_sharded_run_of_two_processes_shows() -> None:
    first, second = run_distributed(shards, 2)
    assert first == (True, True, True, True, True, ("dp_shard",), 0, "FULL_STATE_DICT")
    assert second == (*first[:6], 1, first[7])


def test_the_active_plugin_of_deepspeed() -> None:
    accelerator, plugin = Accelerator(cpu=True), DeepSpeedPlugin()
    share_selection([plugin])
    object.__setattr__(accelerator.state.plan, "plugins", {"deepspeed": {"only": plugin}})
    assert accelerator.deepspeed_plugin is plugin


HANDLERS: dict[str, KwargsHandler] = {
    "autocast_handler": AutocastKwargs(cache_enabled=False),
    "ddp_handler": DistributedDataParallelKwargs(bucket_cap_mb=3),
    "scaler_handler": GradScalerKwargs(growth_interval=5),
    "init_handler": InitProcessGroupKwargs(timeout=timedelta(seconds=90)),
    "profile_handler": ProfileKwargs(with_stack=True),
}


def test_handlers_are_those_that_were_given() -> None:
    accelerator = Accelerator(cpu=True)
    names = (*HANDLERS, "te_recipe_handler", "ao_recipe_handler", "fp8_recipe_handler")
    assert [getattr(accelerator, name) for name in names] == [None] * len(names)
    reset_accel()
    accelerator = Accelerator(cpu=True, kwargs_handlers=list(HANDLERS.values()))
    for name, handler in HANDLERS.items():
        assert getattr(accelerator, name) is handler


def test_the_recipe_of_fp8_is_that_of_its_library() -> None:
    recipe = AORecipeKwargs()
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert accelerator.ao_recipe_handler is recipe
    assert accelerator.te_recipe_handler is None
    other = TERecipeKwargs()
    fp8 = dataclasses.replace(accelerator.plan.fp8, backend=FP8BackendType.TE, recipe=other)
    accelerator.plan = dataclasses.replace(accelerator.plan, fp8=fp8)
    assert accelerator.te_recipe_handler is other
    assert accelerator.ao_recipe_handler is None


def wrap() -> list[bool]:
    """Return what DDP is told of unused parameters, before and after a script sets it."""
    accelerator = Accelerator(cpu=True)
    found = []
    for handler in (None, DistributedDataParallelKwargs(find_unused_parameters=True)):
        accelerator.ddp_handler = handler
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        found.append(model.find_unused_parameters)
    return found


def test_a_ddp_handler_that_is_set_holds_for_models_prepared_later() -> None:
    assert run_distributed(wrap, 2) == [[False, True]] * 2
