"""What a run is used for once it is trained: ``runner eval`` and ``runner predict``. Free of torch.

Both take the run's frozen recipe, changed by overrides as a resumed run's is, and compute in this
process, or in each of several that read their parts of the data.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.machine.errors import ConfigError, Problem
from runner.inference.load import (
    Placement,
    best_of,
    described,
    find_checkpoint,
    other_code,
    other_data,
    restored_step,
    step_of,
)
from runner.recipe import composition, diagnose, hydra_setup, processes
from runner.recipe.batch_plan import plan_batches
from runner.recipe.factory import check_factories
from runner.recipe.schema import PLUGINS, Distributed, Parallelism, Recipe, Trainer
from runner.runs import directory, environment
from runner.runs.job import Job
from runner.runs.json_files import JsonObject
from runner.runs.numerics import Numerics, choose
from runner.training import build, run_log
from runner.training.stopping import Progress

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.data.batches import EvalBatches
    from runner.training.step import Step

MEASURED = ("validation", "test")
LIMIT = "trainer.limit_eval_batches"
# Keys that change nothing of an evaluation or a prediction: what only training reads. A strategy is
# switched off: checkpoints hold full tensors.
ONLY_TRAINING = (
    *("name", "output_dir", "resume", "tags", "optimizer", "scheduler", "checkpoint", "tracker"),
    *("callbacks", "profile", *PLUGINS),
    *(f"trainer.{key}" for key in ("epochs", "max_steps", "max_time", "stop_after", "eval_every")),
    *("trainer.eval_first", "trainer.evaluate"),
    *(f"trainer.{key}" for key in ("log_every", "clip_grad_norm", "clip_grad_value", "drop_last")),
    *(f"trainer.{key}" for key in ("stop_on_nan", "detect_anomaly")),
    # Not accumulation.num_steps: the micro-batch follows from it, and the batch of an evaluation.
    *(f"trainer.accumulation.{key}" for key in ("adjust_scheduler", "sync_with_dataloader")),
    *("trainer.accumulation.sync_each_batch", "trainer.check_gradients"),
    *("trainer.limit_train_batches", "trainer.overfit_batches"),
    *("dataloader.use_seedable_sampler", "dataloader.data_seed"),
)


# Gives the progress of this process, one of several, in a context in which hangs are watched for.
Watch = Callable[[Recipe], AbstractContextManager[Progress]]


def alone(recipe: Recipe) -> AbstractContextManager[Progress]:
    """Give a progress that nobody watches."""
    return contextlib.nullcontext(Progress())


@dataclass(frozen=True)
class Request:
    """What one command asks for.

    Without `splits`, data sets are those that a run measures, as far as it has them; to predict,
    the last of these. `checkpoint` is "best", "last", a name or a path; None: the best, else the
    last. Predictions go to `output`. `placement`: of models that are larger than a device; None:
    they are loaded onto the recipe's. `num_processes` is how many compute together; this is one.
    """

    run_dir: Path
    overrides: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    checkpoint: str | None = None
    output: Path | None = None
    placement: Placement | None = None
    num_processes: int = 1


@dataclass(frozen=True)
class Session:
    """A restored run, ready to compute; batches are by split and data set, of this process."""

    accelerator: Accelerator
    step: Step
    batches: dict[str, dict[str, EvalBatches]]
    checkpoint: Path
    progress: Progress
    notes: list[str]
    recipe: Recipe


def evaluate(request: Request, watch: Watch = alone) -> JsonObject:
    """Measure a run; each process of several has to call it.

    Returns:
        The same on every process: `metrics` by split and name, the `checkpoint` that was measured
        and its `step`, the `seconds` that it took, `num_processes`; and `notes`, on the main
        process: what is not as it was in training, a sentence each.
    """
    from runner.training import evaluation

    began, metrics = time.monotonic(), {}
    with opened(request, watch) as session:
        engine, step, named = session.accelerator, session.step, build.build_metrics(session.recipe)
        for split, sets in session.batches.items():
            with session.progress.in_phase(f"evaluation ({split})", timed=True):
                on_batch = session.progress.batch
                metrics[split] = evaluation.evaluate_sets(engine, step, sets, on_batch, None, named)
        return {
            "metrics": metrics,
            "checkpoint": str(session.checkpoint),
            "step": step_of(session.checkpoint),
            "seconds": time.monotonic() - began,
            "num_processes": session.accelerator.num_processes,
            "notes": session.notes,
        }


# -- the run -------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(request: Request, watch: Watch = alone, *, with_data: bool = True) -> Iterator[Session]:
    """Have a run's models, engine and, if wanted, data in the context."""
    run_dir = directory.existing(request.run_dir)
    if request.num_processes == 1:
        run_log.announce(run_dir.name)
    job, recipe = Job.load(run_dir)
    levels: Mapping[str, str] = {}
    if request.overrides:
        recipe, levels = _overridden(request)
    recipe = for_inference(recipe, request)
    numerics = Numerics(recipe.distributed.num_threads, recipe.deterministic)
    with (
        run_log.log_levels_applied(levels),
        numerics.exported(),
        tempfile.TemporaryDirectory(prefix="runner-weights-") as folder,
    ):
        numerics.apply()
        with watch(recipe) as progress, _engine(recipe, job.run_dir) as accelerator:
            checkpoint = find_checkpoint(job.run_dir, request.checkpoint)
            step = restored_step(checkpoint, recipe, request.placement, Path(folder))
            step.models = {
                name: accelerator.prepare_model(model, evaluation_mode=True)
                for name, model in step.models.items()
            }
            batches = _batches(accelerator, recipe, request.splits) if with_data else {}
            notes: list[str] = []
            if accelerator.is_main_process:
                notes += _notes(request, recipe, checkpoint, with_data)
                for line in (f"weights: {described(checkpoint, job.run_dir)}", *notes):
                    print(line)
            yield Session(accelerator, step, batches, checkpoint, progress, notes, recipe)


def _notes(request: Request, recipe: Recipe, checkpoint: Path, with_data: bool) -> Iterator[str]:
    """Yield what is not as it was in training, or not all of the data."""
    if request.checkpoint is None and best_of(request.run_dir) not in (None, checkpoint):
        yield "weights: the last state, as the best one is damaged"
    recorded = environment.recorded(request.run_dir)
    given = [hydra_setup.key_of(override) for override in request.overrides]
    yield from other_code(recorded)
    if not with_data:
        return
    yield from other_data(recorded, environment.data_files(recipe.data), given)
    limit = recipe.trainer.limit_eval_batches
    if limit is not None and LIMIT not in given:
        yield f"data: a part, as in the run ({LIMIT}={limit}); {LIMIT}=null takes all"


def _overridden(request: Request) -> tuple[Recipe, Mapping[str, str]]:
    """Return the recipe with a request's overrides, and the levels of loggers that they set."""
    _require_effect(request.overrides)
    for line in diagnose.overridden(request.overrides):
        print(line, file=sys.stderr)
    with hydra_setup.session():
        examined = composition.resumed(
            directory.frozen(request.run_dir), request.overrides, trains=False
        )
        recipe = composition.require(examined)
    ConfigError.raise_if(check_factories(recipe))
    return recipe, examined.log_levels


def _require_effect(overrides: Sequence[str]) -> None:
    """Refuse overrides of what only training reads."""
    rule = "only training reads it: no metric and no prediction depends on it"
    ConfigError.raise_if(
        [
            Problem(override, rule, "Leave it out.")
            for override in overrides
            if any(
                f"{hydra_setup.key_of(override)}.".startswith(f"{key}.") for key in ONLY_TRAINING
            )
        ]
    )


def for_inference(recipe: Recipe, request: Request) -> Recipe:
    """Return the recipe for the processes of a request, on the device that it was trained on.

    Several processes measure the samples that one would, in batches of the same size.

    Raises:
        ConfigError: if the processes contradict the recipe, the machine or the placement.
    """
    distributed, number = recipe.distributed, request.num_processes
    asked = any(hydra_setup.key_of(o).startswith("distributed") for o in request.overrides)
    if asked and distributed.kind != "none":
        rule = "a trained run is used in one process, or in as many as --processes says"
        remedy = "Leave it out, give --processes 2, or choose the device: distributed.device=cpu."
        raise ConfigError.of(f"distributed={distributed.kind}", rule, remedy)
    device = "cpu" if distributed.kind == "multi_cpu" else distributed.device
    # A checkpoint holds full tensors.
    off: JsonObject = {**dict.fromkeys(PLUGINS), "parallelism": Parallelism()}
    own = Distributed(device=device, init=distributed.init)
    if number == 1:
        return replace(recipe, distributed=own, **off)
    recipe = replace(recipe, trainer=_same_batches(recipe, number), **off)
    own = replace(own, kind="auto", num_processes=number)
    processes.count(own)
    threads = choose(replace(recipe, distributed=own), number)
    return replace(recipe, distributed=replace(own, num_threads=threads))


def _same_batches(recipe: Recipe, number: int) -> Trainer:
    """Return the trainer with batches of the size that one process measures.

    Its training batch divides by any number of processes: nothing is trained.
    """
    limit = recipe.trainer.limit_eval_batches
    if limit is not None:
        rule = "it counts the batches of one process"
        remedy = f"Give {LIMIT}=null, or leave --processes out."
        raise ConfigError.of(f"{LIMIT}={limit} with --processes {number}", rule, remedy)
    size = plan_batches(recipe.trainer, 1, None).eval_batch
    return replace(
        recipe.trainer,
        global_batch_size=size * number,
        micro_batch_size=None,
        eval_batch_size=size,
        accumulation=replace(recipe.trainer.accumulation, num_steps=None),
    )


@contextlib.contextmanager
def _engine(recipe: Recipe, run_dir: Path) -> Iterator[Accelerator]:
    from accel.comm.rng import set_seed

    # Nothing is logged, and no state is saved.
    recipe.tracker = replace(recipe.tracker, log_with=[], init_kwargs={})
    with build.running(recipe, run_dir, plan_batches(recipe.trainer, 1, None)) as accelerator:
        set_seed(recipe.seed, deterministic=recipe.deterministic)
        yield accelerator


def _batches(
    accelerator: Accelerator, recipe: Recipe, splits: tuple[str, ...]
) -> dict[str, dict[str, EvalBatches]]:
    from runner.data.batches import eval_batches

    data = build.build_data(recipe)
    lacking = [split for split in splits if not data.sets(split)]
    ConfigError.raise_if(
        [
            Problem(f"--split {split}", "the recipe's data has none", "Choose another.")
            for split in lacking
        ]
    )
    wanted = splits or tuple(split for split in MEASURED if data.sets(split))
    return {split: eval_batches(accelerator, data, recipe, split) for split in wanted}
