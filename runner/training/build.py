"""Building the objects of a run from its recipe: engine, step, models, data sets, callbacks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problem, Problems
from accel.machine.imports import load_attribute
from runner.recipe import accelerator_arguments, facts, serialization
from runner.recipe.batch_plan import BatchPlan, plan_batches
from runner.recipe.factory import (
    OF_THE_RUNNER,
    STEP_PARTS,
    Factory,
    Registry,
    check_factories,
    factory_of,
    nodes_of,
    read,
    register,
)
from runner.recipe.schema import SPLITS, Recipe
from runner.runs import directory

if TYPE_CHECKING:
    import torch

    from accel.accelerator import Accelerator
    from runner.data.datasets import Data
    from runner.recipe.composition import Examined
    from runner.training.run import Callback
    from runner.training.step import Step

logger = logging.getLogger(__name__)

# Nodes that decide what is built of a step and its evaluation.
BUILT = ("step", "model", "peft", "objective", "optimizer", "precision", "metrics")
STOCHASTIC = "Add optimizer.stochastic_rounding=true (optimizer=adamw)"


def require(jobs: Sequence[Examined], missing: Sequence[Problem]) -> None:
    """Raise everything that is wrong with any of the jobs, each problem once."""
    problems = dict.fromkeys(missing)
    for examined in jobs:
        problems.update(dict.fromkeys(examined.problems))
        if examined.composed:
            problems.update(dict.fromkeys(check_factories(examined.recipe)))
        if not examined.problems:
            problems.update(dict.fromkeys(accelerator_arguments.problems(examined.recipe)))
            problems.update(dict.fromkeys(directory.problems(examined.recipe)))
    ConfigError.raise_if(list(problems))


def check_steps(jobs: Sequence[Examined]) -> None:
    """Raise what only building shows of the jobs' models, objectives, optimizers and metrics.

    A model is built once for all jobs that have it, without its weights. Left to the job are a step
    of the user's, which decides what it builds, errors of the user's code, and recipes with values
    that the data tells.
    """
    from accel.weights.tensors import init_empty_weights
    from runner.training.step import SupervisedStep

    def model_node(recipe: Recipe) -> str:
        return repr((recipe.model, recipe.peft))

    problems: dict[Problem, None] = {}
    recipes = {repr([getattr(job.recipe, key) for key in BUILT]): job.recipe for job in jobs}
    for _, alike in itertools.groupby(sorted(recipes.values(), key=model_node), model_node):
        model = None
        for recipe in alike:
            step = _factory(recipe, "step")
            if next(facts.late([getattr(recipe, key) for key in (*BUILT, "metrics")]), None):
                continue
            try:
                build_metrics(recipe)
                if step.function is not SupervisedStep:
                    continue
                if model is None:
                    model = _model(recipe, step, init_empty_weights())
                _step_part(recipe, "objective")
                _step_part(recipe, "optimizer")(model)
            except ConfigError as error:
                if "meta" not in str(error):  # torch's code computes with weights
                    problems.update(dict.fromkeys(error.problems))
            except Exception as error:  # the job tells it, with the user's line
                logger.debug("left to the job: %r", error)
    ConfigError.raise_if(list(problems))


def rehearse(jobs: Sequence[Examined]) -> list[str]:
    """Build what the jobs build before their first step; return notes on what was not looked at.

    Models are built on the meta device, and a sample is read of each data set. What several jobs
    have in common is built once.
    """
    from accel.weights.tensors import init_empty_weights

    notes: dict[str, None] = {}
    seen: set[str] = set()
    for examined in jobs:
        recipe = examined.recipe
        keys = ("data", "metrics", "step", "peft", *STEP_PARTS)
        nodes = repr([getattr(recipe, key) for key in keys])
        if nodes in seen:
            continue
        seen.add(nodes)
        data = build_data(recipe)
        recipe, _ = with_facts(recipe, data)
        build_metrics(recipe)
        try:
            for model in build_step(recipe, init_empty_weights()).models.values():
                data.check_model(model)
        except (NotImplementedError, RuntimeError) as error:  # its code computes with weights
            if "meta" not in str(error):
                raise
            notes["the model: it cannot be built without its weights"] = None
        for split in SPLITS:
            for one in data.sets(split).values():
                _read_sample(one)
    return list(notes)


def _read_sample(data_set: Any) -> None:
    if hasattr(data_set, "__getitem__") and hasattr(data_set, "__len__"):
        data_set[0]
    else:
        next(iter(data_set), None)


@contextmanager
def running(recipe: Recipe, run_dir: Path, batch_plan: BatchPlan) -> Iterator[Accelerator]:
    """Have the engine in the context, and end it on every way out of it.

    After an error nothing is exchanged any more: another process may be gone already.
    """
    from accel.precision.amp import tf32

    with tf32(recipe.precision.tf32):
        accelerator = make_accelerator(recipe, run_dir, batch_plan)
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

    States and logs go to `run_dir`, where `checkpoint.project` names no folder; else states go to a
    folder of the run's own there.

    Raises:
        ConfigError: if what is asked for contradicts itself or the machine.
    """
    from accel.accelerator import Accelerator

    project = replace(recipe.checkpoint.project)
    project.logging_dir = project.logging_dir or str(run_dir / "tensorboard")
    if project.project_dir is None:
        project.set_directories(run_dir)
    elif directory.is_run(run_dir):
        project.project_dir = str(directory.checkpoint_folder(run_dir).parent)
    accelerator = Accelerator(
        **accelerator_arguments.arguments(recipe, batch_plan, Environment.read()),
        log_with=list(recipe.tracker.log_with) or None,
        project_config=project,
    )
    # Loader 0 is the run's own: one that an objective prepares draws other permutations.
    accelerator._reserve_loaders(2)
    return accelerator


def build_callbacks(recipe: Recipe) -> dict[str, Callback]:
    """Build the callbacks by name, in the recipe's order."""
    return _by_name(recipe, register.callback)


def build_metrics(recipe: Recipe) -> dict[str, Any]:
    """Build the metrics of evaluations by name."""
    return _by_name(recipe, register.metric)


def _by_name(recipe: Recipe, wanted: Registry) -> dict[str, Any]:
    return {
        key.partition(".")[2]: _checked(factory := factory_of(key, node, registry), factory())
        for key, node, registry in nodes_of(recipe, [])
        if registry is wanted
    }


def build_data(recipe: Recipe) -> Data:
    """Build the data sets.

    What a factory draws, such as a split, depends on the seed alone: it is the same in an
    evaluation, which builds other things before.
    """
    from accel.comm.rng import preserved, set_seed

    factory = _factory(recipe, "data")
    with preserved():
        set_seed(recipe.seed)
        found: Data = _checked(factory, factory())
    return found


def with_facts(recipe: Recipe, data: Data) -> tuple[Recipe, dict[str, object]]:
    """Return a recipe with the facts of its data filled in, and those facts.

    Beside those that the factory tells there are `num_train_samples`, `steps_per_epoch` and
    `total_steps`, as far as they are known.

    Raises:
        ConfigError: if a fact is missing; the message names the nearest.
    """
    nodes = {key: getattr(recipe, key) for key in serialization.LATE}
    if next(facts.late(nodes), None) is None:
        return recipe, {}
    size = data.num_train_samples
    # The number of steps does not depend on how a batch is divided.
    whole = replace(recipe.trainer.accumulation, num_steps=None)
    plan = plan_batches(replace(recipe.trainer, micro_batch_size=None, accumulation=whole), 1, size)
    steps = {"steps_per_epoch": plan.steps_per_epoch, "total_steps": plan.total_steps}
    derived = {"num_train_samples": size, **steps}
    known: dict[str, object] = {n: value for n, value in derived.items() if value is not None}
    known |= data.facts
    ConfigError.raise_if(facts.missing(nodes, known))
    return replace(recipe, **facts.filled(nodes, known)), known


def build_step(recipe: Recipe, around_model: AbstractContextManager[object] | None = None) -> Step:
    """Build the step with its models and optimizers; the recipe's model inside `around_model`.

    The weights are drawn from torch's generator: seed it first.

    Raises:
        ConfigError: if a factory or an argument is wrong.
    """
    factory = _factory(recipe, "step")
    wanted = read(factory.function)
    parts = {}
    for key in STEP_PARTS:
        handed_on = wanted.open and getattr(recipe, key) is not None
        if key in wanted.parameters or handed_on:
            made = key == "model" and recipe.model is not None
            parts[key] = _model(recipe, factory, around_model) if made else _step_part(recipe, key)
    step: Step = _checked(factory, factory(**parts))
    _check_weights(recipe, step.models, step.optimizers)
    return step


def _model(
    recipe: Recipe, step: Factory, around: AbstractContextManager[object] | None
) -> torch.nn.Module:
    """Return the recipe's model, with its adapters if it names any, for the factory of a step."""
    from runner.training import factory_results
    from runner.training.step import SupervisedStep

    factory = _factory(recipe, "model")
    with around or nullcontext():
        made: torch.nn.Module = _checked(factory, factory())
    if recipe.peft is not None:
        # Adapters are initialized in full: what shards a model shards them later.
        node = _factory(recipe, "peft")
        made = load_attribute("runner.language.adapters:wrap")(made, node(), node.place)
    if isinstance(step.function, type) and issubclass(step.function, SupervisedStep):
        factory_results.check_trainable(factory.place, made)
    if recipe.precision.weights is not None:
        _cast(made)
    return made


def _step_part(recipe: Recipe, key: str) -> Any:
    """Return a part of a step: an object, or the function that makes an optimizer or a schedule."""
    from runner.training.parameter_groups import regroup
    from runner.training.timed_schedule import TimedLR

    if getattr(recipe, key) is None:
        return None
    factory = _factory(recipe, key)

    def make_optimizer(model: torch.nn.Module) -> object:
        made = _checked(factory, factory(model if factory.by_name else model.parameters()))
        if recipe.scheduler is not None and hasattr(made, "train"):
            value, rule = f"scheduler with {factory.place}", "it averages weights in its place"
            raise ConfigError.of(value, rule, "Set scheduler=null, and optimizer.warmup_steps=100.")
        own = {key: recipe.optimizer.get(key) for key in OF_THE_RUNNER["optimizer"]}
        if given := {key: value for key, value in own.items() if value is not None}:
            regroup(made, model, **given)
        return made

    def make_scheduler(optimizer: object, num_steps: int) -> object:
        lengths = dict.fromkeys(factory.lengths, int(num_steps))
        derived = replace(factory, arguments={**factory.arguments, **lengths})
        made = _checked(factory, derived(*(optimizer, num_steps)[: 1 + factory.by_name]))
        return TimedLR(made, num_steps) if recipe.scheduler.get("by_time") else made

    if key == "optimizer":
        return make_optimizer
    if key == "scheduler":
        return make_scheduler
    return _checked(factory, factory())


def _factory(recipe: Recipe, key: str) -> Factory:
    return factory_of(key, getattr(recipe, key), getattr(register, key))


def _checked(factory: Factory, made: Any) -> Any:
    """Return what a factory has made, if it is of the right kind."""
    from runner.training import factory_results

    factory_results.check(factory.key, factory.place, made)
    return made


def _cast(model: torch.nn.Module) -> None:
    """Convert the parameters of a model to bf16 in place.

    Buffers keep their format: running statistics and tables of positions need the bits that weights
    can do without.
    """
    import torch

    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def _check_weights(
    recipe: Recipe,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> None:
    """Refuse models and optimizers of a step that do not fit the format of its weights.

    Raises:
        ConfigError: naming all of them.
    """
    import torch

    from accel.precision.bf16_weights import holds_bf16, rounds_stochastically

    found = Problems()
    wanted = recipe.precision.weights
    for name, model in models.items() if wanted else ():
        kept = sum(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
        if kept:
            found.add(
                f"precision.weights={wanted}: {kept} parameters of {name!r} are in fp32",
                "a step that builds its models itself decides their format",
                "Build them in bf16 there, or choose precision=bf16.",
            )
    for name, optimizer in optimizers.items():
        in_bf16, rounds = holds_bf16(optimizer), rounds_stochastically(optimizer)
        kind = type(optimizer).__name__
        if wanted and in_bf16 and not rounds:
            found.add(
                f"precision.weights={wanted} with {name}: {kind}",
                "it rounds to the nearest: updates of less than 2**-9 of a weight are lost",
                f"{STOCHASTIC}, or choose precision=bf16, which keeps weights in fp32.",
            )
        if rounds and not in_bf16:
            found.add(
                f"{name}: {kind} with stochastic rounding",
                "it concerns weights in bf16, and there are none",
                "Choose precision=bf16_weights, or optimizer.stochastic_rounding=false.",
            )
    found.raise_if()
