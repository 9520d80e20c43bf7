"""From the recipe to the engine: every documented handler and plugin reaches `Accelerator`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.accelerator import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.handlers import KwargsHandler
from accel.config.training import GradientAccumulationPlugin, ProjectConfiguration
from runner.config import processes
from runner.config.schema import Recipe

if TYPE_CHECKING:
    from runner.config.batch_plan import BatchPlan


@contextmanager
def running(recipe: Recipe, run_dir: Path, batch_plan: BatchPlan) -> Iterator[Accelerator]:
    """Have the engine in the context, and end it on every way out of it.

    After an error nothing is exchanged any more: another process may be gone already.
    """
    accelerator = make_accelerator(recipe, run_dir, batch_plan)
    try:
        yield accelerator
    except BaseException:
        if accelerator.num_processes == 1:
            accelerator.end_training()
        else:
            for tracker in accelerator.trackers:
                tracker.finish()
        raise
    accelerator.end_training()


def make_accelerator(recipe: Recipe, run_dir: Path, batch_plan: BatchPlan) -> Accelerator:
    """Return the engine that a recipe describes.

    Args:
        recipe: the frozen recipe.
        run_dir: folder of states and logs, where `checkpoint.project` names none.
        batch_plan: the derived batch arithmetic; gives the accumulation steps.

    Raises:
        ConfigError: if what is asked for contradicts itself or the machine.
    """
    accelerator = Accelerator(
        device_placement=recipe.trainer.device_placement,
        mixed_precision=recipe.precision.mode,
        device=processes.device(recipe.distributed),
        dataloader_config=recipe.dataloader,
        deepspeed_plugin=deepspeed_plugin(recipe, batch_plan),
        fsdp_plugin=recipe.fsdp,
        torch_tp_plugin=recipe.tensor_parallel,
        rng_types=recipe.trainer.rng_types,
        log_with=list(recipe.tracker.log_with) or None,
        project_config=_project(recipe, run_dir),
        gradient_accumulation_plugin=_accumulation(recipe, batch_plan),
        # The loop steps schedulers itself, once per optimizer step.
        step_scheduler_with_optimizer=False,
        kwargs_handlers=_handlers(recipe),
        dynamo_plugin=recipe.compile,
    )
    # Loader 0 is the run's own: one that an objective prepares draws other permutations.
    accelerator.preparation.reserve_loader()
    return accelerator


def _handlers(recipe: Recipe) -> list[KwargsHandler]:
    nodes = (
        recipe.distributed.ddp,
        recipe.distributed.init,
        recipe.precision.autocast,
        recipe.precision.scaler,
        recipe.precision.fp8,
        recipe.profile,
    )
    return [node for node in nodes if node is not None]


def deepspeed_plugin(recipe: Recipe, batch_plan: BatchPlan) -> DeepSpeedPlugin | None:
    """Return the plugin, with what the recipe decides: its own configuration may not contradict.

    Args:
        recipe: the recipe.
        batch_plan: the derived batch arithmetic.
    """
    if recipe.deepspeed is None:
        return None
    plugin, trainer = replace(recipe.deepspeed), recipe.trainer
    for key, number in (
        ("train_micro_batch_size_per_gpu", batch_plan.micro_batch),
        ("train_batch_size", batch_plan.global_batch),
        ("gradient_accumulation_steps", batch_plan.accumulation),
    ):
        plugin.decide(key, number, f"{number} by the recipe's trainer")
    if trainer.clip_grad_norm is not None:
        source = f"trainer.clip_grad_norm={trainer.clip_grad_norm}"
        plugin.decide("gradient_clipping", trainer.clip_grad_norm, source)
    return plugin


def _accumulation(recipe: Recipe, batch_plan: BatchPlan) -> GradientAccumulationPlugin:
    return replace(recipe.trainer.accumulation, num_steps=batch_plan.accumulation)


def _project(recipe: Recipe, run_dir: Path) -> ProjectConfiguration:
    project = replace(recipe.checkpoint.project)
    if project.logging_dir is None:
        project.logging_dir = str(run_dir / "tensorboard")
    if project.project_dir is None:
        project.set_directories(run_dir)
    return project
