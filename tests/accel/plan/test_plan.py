"""Arguments and environment make one plan, or one error with everything that is wrong (E1, E5)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from accel.config.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel.config.handlers import AutocastKwargs, InitProcessGroupKwargs, KwargsHandler
from accel.config.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.machine.enums import DistributedType, PrecisionType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from accel.plan.arguments import Arguments
from accel.plan.plan import resolve

TWO = Environment(
    rank=1, local_rank=1, world_size=2, master_addr="localhost", master_port=1, use_cpu=True
)
ONE = Environment(use_cpu=True)


def problems(arguments: Arguments, environment: Environment = ONE) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(arguments, environment)
    return str(caught.value)


def test_one_process() -> None:
    plan = resolve(Arguments(), ONE)
    assert (plan.rank, plan.world_size, plan.backend, plan.strategy) == (0, 1, None, "single")
    assert plan.distributed_type is DistributedType.NO
    assert plan.device == torch.device("cpu")
    assert plan.mixed_precision == "no"
    assert plan.accumulation.num_steps == 1
    assert plan.rng_types == ("generator",)


def test_handlers_are_known_and_single() -> None:
    text = problems(
        Arguments(kwargs_handlers=[AutocastKwargs(), AutocastKwargs(), KwargsHandler()])
    )
    assert "two AutocastKwargs" in text
    assert "each is one of AutocastKwargs, DistributedDataParallelKwargs" in text


@pytest.mark.parametrize(
    ("given_value", "variable", "result"),
    [
        (None, None, "no"),
        (None, "bf16", "bf16"),
        ("fp16", "bf16", "fp16"),
        (PrecisionType.BF16, None, "bf16"),
        ("BF16", None, "bf16"),
    ],
)
def test_mixed_precision(given_value: Any, variable: str | None, result: str) -> None:
    environment = dataclasses.replace(ONE, mixed_precision=variable)
    assert resolve(Arguments(mixed_precision=given_value), environment).mixed_precision == result


def test_unknown_precision() -> None:
    text = problems(Arguments(mixed_precision="bf61"))
    assert "mixed_precision='bf61'" in text
    assert "Did you mean 'bf16'?" in text
    text = problems(Arguments(), dataclasses.replace(ONE, mixed_precision="half"))
    assert "ACCELERATE_MIXED_PRECISION='half'" in text


def test_accumulation_has_one_owner() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2)
    text = problems(Arguments(gradient_accumulation_steps=4, gradient_accumulation_plugin=plugin))
    assert "gradient_accumulation_steps=4" in text
    assert "num_steps=2" in text


def test_loader_settings_have_one_owner() -> None:
    config = DataLoaderConfiguration(split_batches=True)
    assert (
        resolve(Arguments(dataloader_config=config, split_batches=True), ONE).dataloader == config
    )
    assert resolve(Arguments(even_batches=False), ONE).dataloader.even_batches is False
    text = problems(Arguments(dataloader_config=config, split_batches=False))
    assert "split_batches=False with dataloader_config.split_batches=True" in text


def test_project() -> None:
    plan = resolve(Arguments(project_dir="here"), ONE)
    assert (plan.project.project_dir, plan.project.logging_dir) == ("here", "here")
    config = ProjectConfiguration(automatic_checkpoint_naming=True)
    plan = resolve(Arguments(project_dir="here", project_config=config), ONE)
    assert plan.project.automatic_checkpoint_naming
    assert (plan.project.project_dir, plan.project.logging_dir) == ("here", "here")
    assert config.project_dir is None
    given_config = ProjectConfiguration("there")
    assert resolve(Arguments(project_config=given_config), ONE).project is given_config
    assert "'here'" in problems(Arguments(project_dir="here", project_config=given_config))


def test_backend() -> None:
    def backend(name: str | None) -> str | None:
        handler = InitProcessGroupKwargs(backend=name)
        return resolve(Arguments(kwargs_handlers=[handler]), TWO).backend

    assert backend(None) == "gloo"
    assert backend("nccl") == "gloo"  # the documented default stands for the device's own
    assert backend("cpu:gloo") == "cpu:gloo"
    handler = InitProcessGroupKwargs(backend="gluu")
    assert "Did you mean 'gloo'?" in problems(Arguments(kwargs_handlers=[handler]), TWO)


def test_processes_need_ranks_and_a_place_to_meet() -> None:
    text = problems(Arguments(), Environment(world_size=2, rank=2, use_cpu=True))
    assert "RANK=2" in text
    assert "LOCAL_RANK is not set" in text
    assert "MASTER_ADDR or MASTER_PORT is not set" in text
    handler = InitProcessGroupKwargs(init_method="file:///tmp/x")
    plan = resolve(Arguments(kwargs_handlers=[handler]), dataclasses.replace(TWO, master_addr=None))
    assert plan.init.init_method == "file:///tmp/x"


def test_device_has_one_owner() -> None:
    assert "they disagree" in problems(Arguments(cpu=True, device="cuda"))
    assert "ACCELERATE_USE_CPU" in problems(Arguments(device="cuda"))
    assert resolve(Arguments(cpu=True, device="cpu"), Environment()).device_type == "cpu"


@pytest.mark.parametrize(
    "recipe", [TERecipeKwargs(), MSAMPRecipeKwargs(), AORecipeKwargs(), FP8RecipeKwargs()]
)
def test_a_recipe_of_fp8_training_needs_fp8(recipe: KwargsHandler) -> None:
    text = problems(Arguments(mixed_precision="bf16", kwargs_handlers=[recipe]))
    assert f"{type(recipe).__name__} with mixed_precision='bf16'" in text
    assert "Give mixed_precision='fp8'" in text


def test_dynamo() -> None:
    assert resolve(Arguments(dynamo_backend="no"), ONE).dynamo == TorchDynamoPlugin()
    assert "Did you mean 'inductor'?" in problems(Arguments(dynamo_backend="indctor"))
    both = Arguments(dynamo_backend="no", dynamo_plugin=TorchDynamoPlugin())
    assert "given in two places with different values" in problems(both)


def test_everything_wrong_is_said_at_once() -> None:
    arguments = Arguments(
        mixed_precision="bf61",
        gradient_accumulation_steps=0,
        rng_types=["x"],
        plugins={"fsdp_plugin": object()},
        kwargs_handlers=[KwargsHandler()],
    )
    with pytest.raises(ConfigError) as caught:
        resolve(arguments, dataclasses.replace(ONE, world_size=-1))
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize(
    ("kind", "expected"), [("cuda", DistributedType.MULTI_GPU), ("xpu", DistributedType.MULTI_XPU)]
)
def test_reported_type_follows_the_device(
    kind: str, expected: DistributedType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: True)
    monkeypatch.setattr(getattr(torch, kind), "device_count", lambda: 2)
    plan = resolve(Arguments(device=kind), dataclasses.replace(TWO, use_cpu=False))
    assert plan.distributed_type is expected
    assert plan.device == torch.device(kind, 1)
