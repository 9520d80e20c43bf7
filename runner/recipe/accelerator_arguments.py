"""From a recipe to the arguments of the engine, and what the engine and the machine refuse.

Free of torch until something is checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel.config.handlers import KwargsHandler
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problem, Problems
from accel.plan.arguments import selected
from accel.strategies.table import plugins
from runner.recipe import processes
from runner.recipe.batch_plan import BatchPlan, plan_batches
from runner.recipe.keys import of_the_recipe
from runner.recipe.schema import PLUGINS, Recipe


def arguments(recipe: Recipe, batch_plan: BatchPlan | None, here: Environment) -> dict[str, Any]:
    """Return the arguments of `Accelerator` for a run.

    Args:
        recipe: of the run.
        batch_plan: None where it is not known.
        here: what a process of the run finds in its environment.
    """
    chosen = list(recipe.plugins.values())
    accumulation = recipe.trainer.accumulation
    if batch_plan is not None:
        chosen = _plugins(recipe, batch_plan)
        accumulation = replace(accumulation, num_steps=batch_plan.accumulation)
    return {
        "device_placement": recipe.trainer.device_placement,
        "mixed_precision": recipe.precision.mode,
        "device": processes.device(recipe.distributed),
        "dataloader_config": recipe.dataloader,
        "strategy_plugins": chosen,
        "parallelism_config": processes.parallelism(recipe, here),
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


def problems(recipe: Recipe) -> list[Problem]:
    """Return what is wrong with processes, batch sizes, the device, the strategy and the trackers.

    Raises:
        MissingPackageError: if the library of a tracker is not installed.
    """
    from accel.trackers.table import filter_trackers

    checks: tuple[Callable[[], object], ...] = (
        lambda: _batch_plan(recipe),
        lambda: _check_plan(recipe),
        lambda: _check_clipping(recipe),
        lambda: _check_weights(recipe),
        lambda: _check_folder(recipe),
        lambda: ConfigError.raise_if(environment_conflicts(recipe, Environment.read())),
        lambda: filter_trackers(recipe.tracker.log_with, logging_dir=recipe.output_dir),
    )
    found = Problems()
    for attempt in checks:
        found.collect(attempt)
    return list(dict.fromkeys(found))


def _batch_plan(recipe: Recipe) -> BatchPlan:
    number = processes.count(recipe.distributed)
    return plan_batches(recipe.trainer, processes.dp_size(recipe, number), None)


def _check_plan(recipe: Recipe) -> None:
    """Raise what the engine has to say against a recipe, in the recipe's words."""
    from accel.machine.imports import load_attribute
    from accel.plan.arguments import Arguments
    from accel.plan.plan import resolve

    if processes.lacks_expected_accelerators():  # checked when the job starts
        return
    here = processes.environment(recipe.distributed)
    try:
        batch_plan = _batch_plan(recipe)
    except ConfigError:  # reported beside this one
        batch_plan = None
    with of_the_recipe():
        spec = resolve(Arguments.of(arguments(recipe, batch_plan, here)), here).spec
        if not spec.place.startswith("accel."):  # ours takes a second, and the workers load it
            load_attribute(spec.place)


def _check_clipping(recipe: Recipe) -> None:
    value, found = recipe.trainer.clip_grad_value, selected(recipe.plugins, 1)
    if value is not None and not found.spec.clips_value:
        on = next(iter(found.plugins))
        raise ConfigError.of(
            f"trainer.clip_grad_value={value} with {on}=",
            "sharded gradients support clipping by norm only",
            f"Set trainer.clip_grad_norm instead, or {on}=null.",
        )


def _check_weights(recipe: Recipe) -> None:
    """Raise if a strategy decides the format of weights, or where they are initialized."""
    found = selected(recipe.plugins, 1)
    if recipe.precision.weights is not None and found.spec.owns_parameters:
        raise ConfigError.of(
            f"precision.weights={recipe.precision.weights} with {found.spec.label(found.plugins)}=",
            "optimizers step its master weights, which it keeps in fp32 beside those in bf16",
            "Choose precision=bf16.",
        )
    setting = found.spec.rank0_init(found.plugins)
    if recipe.model is None and setting:
        raise ConfigError.of(
            f"{setting} with model=null",
            "the step builds its own models, with weights on every rank",
            "Leave it out, or choose model=….",
        )


def _check_folder(recipe: Recipe) -> None:
    """Raise if states cannot be written where a recipe wants them."""
    named = recipe.checkpoint.project.project_dir
    place = Path(named or ".").expanduser().absolute()
    while not place.exists():
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK)) and named is not None:
        rule, remedy = f"{place} is no folder that can be written", "Name another, or leave it out."
        raise ConfigError.of(f"checkpoint.project.project_dir={named}", rule, remedy)


def environment_conflicts(recipe: Recipe, environment: Environment) -> list[Problem]:
    """Return the variables of the environment that would change what `recipe` describes.

    A script on the engine follows them; a run does not, since its recorded recipe lacks them.
    """
    return [
        Problem(f"{variable} (environment)", "a run follows its recipe alone", remedy)
        for variable, remedy in _deciding(recipe, environment)
    ]


def _deciding(recipe: Recipe, environment: Environment) -> Iterator[tuple[str, str]]:
    """Yield (variable, what to write instead)."""
    for plugin in plugins():
        if plugin.switch and environment.flag(plugin.switch) and plugin.name not in recipe.plugins:
            yield plugin.switch, f"Unset it, and choose {plugin.name}=…."
    backend = environment.variables.get("ACCELERATE_DYNAMO_BACKEND", "")
    if backend.lower() not in ("", "no"):
        remedy = "Unset it, and choose compile=default."
        yield f"ACCELERATE_DYNAMO_BACKEND={backend}", remedy
    if environment.mixed_precision not in (None, recipe.precision.mode):
        yield (
            f"ACCELERATE_MIXED_PRECISION={environment.mixed_precision}",
            (f"Unset it, or choose precision={environment.mixed_precision}."),
        )
    for plugin in plugins():
        if plugin.name in recipe.plugins:
            remedy = f"Unset it, and set the key of {plugin.name} that it stands for."
            for name, text in plugin.variables(environment).items():
                yield f"{name}={text}", remedy
