"""From the recipe to the engine: every documented handler and plugin reaches `Accelerator`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.accelerator import Accelerator
from accel.config.handlers import KwargsHandler
from accel.config.training import ProjectConfiguration
from accel.precision.tf32 import tf32
from runner.recipe import processes
from runner.recipe.schema import PLUGINS, Recipe

if TYPE_CHECKING:
    from runner.recipe.batch_plan import BatchPlan


@contextmanager
def running(recipe: Recipe, run_dir: Path, batch_plan: BatchPlan) -> Iterator[Accelerator]:
    """Have the engine in the context, and end it on every way out of it.

    After an error nothing is exchanged any more: another process may be gone already.
    """
    with tf32(recipe.precision.tf32), _ended(make_accelerator(recipe, run_dir, batch_plan)) as own:
        yield own


@contextmanager
def _ended(accelerator: Accelerator) -> Iterator[Accelerator]:
    try:
        yield accelerator
    except BaseException:
        accelerator.tracker_group.finish(failed=True)
        if accelerator.num_processes == 1:
            accelerator.end_training()
        raise
    accelerator.end_training()


def make_accelerator(recipe: Recipe, run_dir: Path, batch_plan: BatchPlan) -> Accelerator:
    """Return the engine that a recipe describes.

    States and logs go to `run_dir`, where `checkpoint.project` names no folder.

    Raises:
        ConfigError: if what is asked for contradicts itself or the machine.
    """
    accelerator = Accelerator(
        **arguments(recipe, batch_plan),
        log_with=list(recipe.tracker.log_with) or None,
        project_config=_project(recipe, run_dir),
    )
    # Loader 0 is the run's own: one that an objective prepares draws other permutations.
    accelerator._reserve_loaders(2)
    return accelerator


def arguments(recipe: Recipe, batch_plan: BatchPlan | None) -> dict[str, Any]:
    """Return the arguments of `Accelerator` for a run; `batch_plan` is None where not known."""
    plugins = list(recipe.plugins.values())
    accumulation = recipe.trainer.accumulation
    if batch_plan is not None:
        plugins = _plugins(recipe, batch_plan)
        accumulation = replace(accumulation, num_steps=batch_plan.accumulation)
    return {
        "device_placement": recipe.trainer.device_placement,
        "mixed_precision": recipe.precision.mode,
        "device": processes.device(recipe.distributed),
        "dataloader_config": recipe.dataloader,
        "strategy_plugins": plugins,
        "rng_types": recipe.trainer.rng_types,
        "gradient_accumulation_plugin": accumulation,
        # The loop steps schedulers itself, once per optimizer step.
        "step_scheduler_with_optimizer": False,
        "kwargs_handlers": _handlers(recipe),
        "dynamo_plugin": recipe.compile,
    }


def _handlers(recipe: Recipe) -> list[KwargsHandler]:
    nodes = (
        recipe.distributed.ddp,
        recipe.distributed.init,
        recipe.precision.autocast,
        recipe.precision.scaler,
        recipe.precision.fp8_torchao,
        recipe.precision.fp8_te,
        recipe.profile,
    )
    return [node for node in nodes if node is not None]


def _plugins(recipe: Recipe, batch_plan: BatchPlan) -> list[object]:
    source = "by the recipe's trainer"
    decided: dict[str, tuple[Any, str]] = {
        name: (number, f"{number} {source}")
        for name, number in (
            ("micro_batch_size", batch_plan.micro_batch),
            ("global_batch_size", batch_plan.global_batch),
            ("accumulation_steps", batch_plan.accumulation),
        )
    }
    norm = recipe.trainer.clip_grad_norm
    if norm is not None:
        decided["clip_grad_norm"] = norm, f"trainer.clip_grad_norm={norm}"
    adopting = ((PLUGINS[name].adopt, plugin) for name, plugin in recipe.plugins.items())
    return [plugin if adopt is None else adopt(plugin, decided) for adopt, plugin in adopting]


def _project(recipe: Recipe, run_dir: Path) -> ProjectConfiguration:
    project = replace(recipe.checkpoint.project)
    if project.logging_dir is None:
        project.logging_dir = str(run_dir / "tensorboard")
    if project.project_dir is None:
        project.set_directories(run_dir)
    return project
