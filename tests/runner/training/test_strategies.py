"""R1, R5: equal losses under every strategy, and states that any strategy resumes."""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import GradientAccumulationPlugin, TorchDynamoPlugin
from accel.machine.errors import ConfigError
from runner.recipe import accelerator_arguments
from runner.recipe.schema import Distributed, Parallelism, Precision, Recipe
from runner.training.console import Display
from tests.helpers import about, run_distributed
from tests.runner import loops

TP_PLAN = {"0": "colwise", "3": "rowwise"}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": FullyShardedDataParallelPlugin()},
    "tp": {"tensor_parallel": TorchTensorParallelPlugin(tp_size=2, tp_plan=TP_PLAN)},
    "zero2": {"deepspeed": DeepSpeedPlugin(zero_stage=2)},
    "zero3": {"deepspeed": DeepSpeedPlugin(zero_stage=3)},
    "pp": {"parallelism": Parallelism(pp_size=2, pp_split=["3"])},
    "compiled": {"compile": TorchDynamoPlugin(backend="eager")},
}


def recipe_with(name: str, **changes: Any) -> Recipe:
    accumulation = GradientAccumulationPlugin(num_steps=2)
    settings = {"trainer__accumulation": accumulation, "trainer__clip_grad_norm": 0.5}
    return loops.recipe_of(**{**settings, **ENGINES[name], **changes})


def shown(folder: Path, recipe: Recipe, **arguments: Any) -> str:
    """Train, and return what a person sees of it."""
    text = StringIO()
    display = Display(console=Console(file=text, width=200))
    loops.build(folder, recipe, display=display, **arguments).run()
    return text.getvalue()


def train_and_go_on(folder: str, first: str, second: str) -> tuple[list[float], str, str]:
    """Train 4 steps under an engine and 4 under another; return the losses and both headers."""
    run_dir = Path(folder)
    before = shown(run_dir, recipe_with(first, trainer__max_steps=8, trainer__stop_after=4))
    after = shown(run_dir, recipe_with(second, trainer__max_steps=8), resume_from=newest(run_dir))
    loops.forget()
    return loops.losses(run_dir), before, after


def newest(run_dir: Path) -> str:
    return str(loops.newest(run_dir))


def reference(folder: Path) -> list[float]:
    loops.run(folder, recipe_with("ddp", trainer__max_steps=8))
    return loops.losses(folder)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("fsdp", "ddp"), ("ddp", "tp"), ("tp", "zero2"), ("zero3", "fsdp")),
        *(("zero2", "pp"), ("pp", "fsdp")),
        pytest.param("compiled", "zero3", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_engine(first: str, second: str, tmp_path: Path) -> None:
    expected = reference(tmp_path / "reference")
    (losses, before, after), *_ = run_distributed(
        train_and_go_on, 2, str(tmp_path / "run"), first, second
    )
    assert losses == about(expected, rel=2e-5)
    names = {"tp": "tp", "pp": "pp", "fsdp": "fsdp", "zero2": "deepspeed", "zero3": "deepspeed"}
    for name, header in ((first, before), (second, after)):
        assert f"engine     {names.get(name, 'ddp')} ·" in header


def with_statistics() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = (torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh())
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))


def train_statistics(folder: str, engine: str) -> None:
    recipe = recipe_with(engine, trainer__epochs=None, trainer__max_steps=5)
    loops.run(Path(folder), recipe, model=with_statistics(), make_scheduler=None)
    loops.forget()


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero2", "pp"])
def test_each_rank_evaluates_the_statistics_that_are_saved(engine: str, tmp_path: Path) -> None:
    run_distributed(train_statistics, 2, str(tmp_path), engine)
    model, data = with_statistics().eval(), loops.Points(loops.NUM_VALIDATION)
    model.load_state_dict(loops.weights(tmp_path))
    with torch.no_grad():
        expected = (model(data.x).squeeze(-1) - data.y).square().mean().item()
    assert loops.records(tmp_path, "validation")[-1]["loss"] == pytest.approx(expected, rel=1e-5)


def settings_of(folder: str, plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """Return what the engine of a run is configured with."""
    recipe = loops.recipe_of(deepspeed=plugin, trainer__clip_grad_norm=0.5)
    loop = loops.build(Path(folder), recipe)
    loop.run()
    (model,) = loop.step.models.values()
    config = dict(model._config._param_dict)
    loops.forget()
    return config


def runs_with_files(folder: str) -> None:
    """A file's "auto" values come from the recipe, and without a file all sizes are the model's."""
    auto = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping"), "auto"
    )
    file = Path(folder) / f"{os.environ['RANK']}.json"
    file.write_text(json.dumps({**auto, "zero_optimization": {"stage": 3}}))
    found = settings_of(f"{folder}/auto", DeepSpeedPlugin(hf_ds_config=str(file)))
    assert [found[name] for name in auto] == [4, 8, 0.5]
    found = settings_of(f"{folder}/own", DeepSpeedPlugin(zero_stage=3))
    assert found["zero_optimization"]["reduce_bucket_size"] == 4 * 4
    assert found["zero_optimization"]["stage3_param_persistence_threshold"] == 10 * 4
    wrong = {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 99, "gradient_clipping": 2}
    file.write_text(json.dumps({**wrong, "gradient_accumulation_steps": 4}))
    with pytest.raises(ConfigError) as error:
        settings_of(f"{folder}/wrong", DeepSpeedPlugin(hf_ds_config=str(file)))
    assert len(error.value.problems) == 4, error.value
    assert f"{file}: gradient_clipping=2 with trainer.clip_grad_norm=0.5" in str(error.value)
    loops.forget()


def test_deepspeeds_file_and_the_recipe_agree(tmp_path: Path) -> None:
    run_distributed(runs_with_files, 2, str(tmp_path))


def test_fp16_under_deepspeed_wants_a_gpu() -> None:
    recipe = Recipe(
        deepspeed=DeepSpeedPlugin(),
        precision=Precision(mode="fp16"),
        distributed=Distributed(kind="multi_cpu"),
    )
    assert "precision=fp16 under DeepSpeed on a CPU" in map_values(
        accelerator_arguments.problems(recipe)
    )


def map_values(problems: list[Any]) -> list[str]:
    return [problem.value for problem in problems]


def test_states_hold_names_without_any_wrapper(tmp_path: Path) -> None:
    recipe = recipe_with("compiled", trainer__max_steps=1)
    loops.run(tmp_path, recipe)
    assert set(loops.weights(tmp_path)) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert all(isinstance(value, torch.Tensor) for value in loops.weights(tmp_path).values())
