"""The only place where a recipe becomes objects. Free of torch until one is built or checked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accel.checkpoint import directory as checkpoints
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problem, Problems
from runner.recipe import environment_conflicts, paths, processes, signatures
from runner.recipe.batch_plan import BatchPlan, plan_batches
from runner.recipe.error_keys import of_the_recipe
from runner.recipe.factory import Factory, factory_of
from runner.recipe.factory_nodes import STEP_PARTS, nodes_of, step_problems
from runner.recipe.registry import register
from runner.recipe.schema import Recipe
from runner.run_dir import directory

if TYPE_CHECKING:
    from runner.data.datasets import Data
    from runner.recipe.composition import Examined
    from runner.training.callback import Callback
    from runner.training.step import Step


@dataclass
class Parts:
    """What a recipe builds besides the engine; callbacks are by name, in the recipe's order."""

    step: Step
    data: Data
    callbacks: dict[str, Callback]


def require(jobs: Sequence[Examined], missing: Sequence[Problem]) -> None:
    """Raise everything that is wrong with any of the jobs, each thing once."""
    problems = dict.fromkeys(missing)
    for examined in jobs:
        problems.update(dict.fromkeys(examined.problems))
        if examined.composed:
            factories = check_factories(examined.recipe)
            factories = factories or try_factories(examined.recipe)
            problems.update(dict.fromkeys(factories))
        if not examined.problems:
            problems.update(dict.fromkeys(check_machine(examined.recipe)))
    ConfigError.raise_if(list(problems))


def check_machine(recipe: Recipe) -> list[Problem]:
    """Return what is wrong with processes, batch sizes, the device, the strategy and the trackers.

    Raises:
        MissingPackageError: if the library of a tracker is not installed.
    """
    from accel.trackers.table import filter_trackers

    distributed = recipe.distributed
    checks: tuple[Callable[[], object], ...] = (
        lambda: _batch_plan(recipe),
        lambda: _check_plan(recipe),
        lambda: _check_clipping(recipe),
        lambda: ConfigError.raise_if(_weights_problems(recipe)),
        lambda: ConfigError.raise_if(environment_conflicts.problems(recipe, Environment.read())),
        lambda: processes.check_interface(distributed),
        lambda: _check_run_dir(recipe),
        lambda: _check_states_folder(recipe),
        lambda: filter_trackers(recipe.tracker.log_with, logging_dir=recipe.output_dir),
    )
    problems = Problems()
    for attempt in checks:
        try:
            attempt()
        except ConfigError as error:
            problems += error.problems
    return list(dict.fromkeys(problems))


def _weights_problems(recipe: Recipe) -> list[Problem]:
    from runner.recipe import weights_format

    return weights_format.strategy_problems(recipe)


def _batch_plan(recipe: Recipe) -> BatchPlan:
    number = processes.count(recipe.distributed)
    return plan_batches(recipe.trainer, processes.dp_size(recipe, number), None)


def _check_plan(recipe: Recipe) -> None:
    """Raise what the engine has to say against a recipe, in the recipe's words."""
    from accel.plan.arguments import Arguments
    from accel.plan.plan import resolve
    from accel.strategies.base import strategy_class
    from runner.recipe.accelerator import arguments

    if processes.lacks_expected_accelerators():  # checked when the job starts
        return
    here = processes.environment(recipe.distributed)
    try:
        batch_plan = _batch_plan(recipe)
    except ConfigError:  # reported beside this one
        batch_plan = None
    with of_the_recipe():
        spec = resolve(Arguments.of(arguments(recipe, batch_plan)), here).spec
        if not spec.place.startswith("accel."):  # ours takes a second, and the workers load it
            strategy_class(spec)


def _check_run_dir(recipe: Recipe) -> None:
    if recipe.run_dir is not None and recipe.resume is None:
        directory.require_unused(Path(recipe.run_dir).expanduser().absolute())


def _check_states_folder(recipe: Recipe) -> None:
    """Raise if states cannot be written where the recipe wants them, or another run has its own."""
    wanted = recipe.checkpoint.project.project_dir
    if wanted is None or recipe.resume is not None:
        return
    place = Path(wanted).expanduser().absolute()
    present = checkpoints.checkpoints(place / checkpoints.FOLDER)
    if present:
        value = f"checkpoint.project.project_dir={wanted}"
        rule = f"a run has a folder of its own, and {present[-1].parent} holds checkpoints"
        run = directory.run_of(present[-1])
        remedy = (
            "Give another folder, or leave it out: output_dir= moves a run with its checkpoints. "
            f"To go on with the run there{f' ({run})' if run else ''}: resume=<its directory>."
        )
        raise ConfigError.of(value, rule, remedy)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return
    except OSError as error:
        value = f"checkpoint.project.project_dir={wanted}"
        rule = f"states are written there, and that failed ({paths.failure(error)})"
        remedy = "Give a folder that you may write to, or leave it out."
        raise ConfigError.of(value, rule, remedy) from error


def _check_clipping(recipe: Recipe) -> None:
    from accel.plan.choose_strategy import selected

    value, found = recipe.trainer.clip_grad_value, selected(recipe.plugins, 1)
    if value is not None and not found.spec.clips_value:
        on = next(iter(found.plugins))
        raise ConfigError.of(
            f"trainer.clip_grad_value={value} with {on}=",
            "sharded gradients support clipping by norm only",
            f"Set trainer.clip_grad_norm instead, or {on}=null.",
        )


def check_factories(recipe: Recipe) -> list[Problem]:
    """Return what is wrong with the nodes that name factories."""
    problems = Problems()
    found: dict[str, Factory] = {}
    for key, node, registry in nodes_of(recipe, problems):
        try:
            found[key] = factory_of(key, node, registry)
        except ConfigError as error:
            problems += error.problems
    for key, factory in found.items():
        problems += factory.problems(STEP_PARTS if key == "step" else ())
    for key in ("step", "data"):
        if getattr(recipe, key) is None:
            names = ", ".join(getattr(register, key).names())
            problems.add(f"{key}=null", "a run needs it", f"Choose {key}.name from: {names}.")
    if "step" in found:
        step = found["step"]
        problems += step_problems(recipe, step.label, signatures.read(step.function))
    return problems


def try_factories(recipe: Recipe) -> list[Problem]:
    """Return what the shipped factories have to say against the values that they are given.

    For a recipe whose names and arguments `check_factories` has found right.
    """
    from runner.recipe import trial

    return [
        problem
        for key, node, registry in nodes_of(recipe, [])
        for problem in trial.problems(factory_of(key, node, registry))
    ]


def build_parts(
    recipe: Recipe, around_model: AbstractContextManager[object] | None = None
) -> Parts:
    """Build the step with its models and optimizers, the data sets and the callbacks.

    The weights are drawn from torch's generator: seed it first. The recipe's model is built inside
    `around_model`.

    Raises:
        ConfigError: if a factory or an argument is wrong.
    """
    ConfigError.raise_if(check_factories(recipe))
    callbacks = {
        key.removeprefix("callbacks."): factory_of(key, node, registry)()
        for key, node, registry in nodes_of(recipe, [])
        if registry is register.callback
    }
    step = build_step(recipe, around_model)
    return Parts(step=step, data=build_data(recipe), callbacks=callbacks)


def build_data(recipe: Recipe) -> Data:
    """Build the data sets."""
    return _part(recipe, "data")()


def build_step(recipe: Recipe, around_model: AbstractContextManager[object] | None = None) -> Step:
    """Build the step with its models and optimizers; the recipe's model inside `around_model`."""
    from runner.recipe import weights_format

    step = _part(recipe, "step")
    wanted = signatures.read(step.function)
    around = {"model": around_model or nullcontext()}
    parts = {}
    for key in STEP_PARTS:
        handed_on = wanted.open and getattr(recipe, key) is not None
        if key in wanted.parameters or handed_on:
            with around.get(key, nullcontext()):
                parts[key] = _step_part(recipe, key)
    made: Step = step(**parts)
    weights_format.check(recipe, made.models, made.optimizers)
    return made


def _step_part(recipe: Recipe, key: str) -> object:
    from runner.recipe import factory_results, weights_format

    if getattr(recipe, key) is None:
        return None
    factory = _part(recipe, key)
    if key == "optimizer":
        return factory if factory.by_name else lambda model: factory(model.parameters())
    if key == "scheduler":
        return factory if factory.by_name else lambda optimizer, num_steps: factory(optimizer)
    made = factory()
    if key == "model" and _is_supervised(recipe):
        factory_results.check_trainable(factory.place, made)
    if key == "model":
        weights_format.cast(made, recipe)
    return made


def _is_supervised(recipe: Recipe) -> bool:
    from runner.training.step import SupervisedStep

    function = _part(recipe, "step").function
    return isinstance(function, type) and issubclass(function, SupervisedStep)


def _part(recipe: Recipe, key: str) -> Factory:
    return factory_of(key, getattr(recipe, key), getattr(register, key))
