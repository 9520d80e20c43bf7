"""Evaluations of a run: when they are due, and how a data set is measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from accel.comm.ops import broadcast, broadcast_object_list
from accel.comm.rng import preserved
from accel.machine.errors import ConfigError, nearest
from accel.optimizer import unwrap_optimizer
from accel.plan.dims import AXES, PP
from runner.runs.json_files import TIME_IS_UP
from runner.training.build import build_metrics
from runner.training.sample_metrics import SampleMetrics
from runner.training.state import Stop
from runner.training.step import checked_metrics, checked_tensors

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    from accel import Accelerator
    from runner.data.batches import EvalBatches
    from runner.training.metrics import Recorder
    from runner.training.run import Run
    from runner.training.step import Step


class Interrupted(Exception):
    """An evaluation was left because the run is to stop."""


def monitored_value(
    metrics: Mapping[str, float], monitor: str | None, key: str = "checkpoint.monitor"
) -> float:
    """Return the monitored metric; a ConfigError about `key` if it was not measured."""
    if monitor is None or monitor not in metrics:
        rule = f"the evaluation measures {', '.join(metrics)}"
        raise ConfigError.of(f"{key}={monitor!r}", rule, nearest(str(monitor), metrics))
    return metrics[monitor]


def evaluate_sets(
    accelerator: Accelerator,
    step: Step,
    sets: Mapping[str, EvalBatches],
    on_batch: Callable[[EvalBatches, int], None],
    limit: int | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Return the metrics of the data sets of a split, the same on every process.

    Those of a named data set are ``name/metric``. Models are in eval mode and no gradients are
    kept; modes and random generators are afterwards as they were.

    Args:
        accelerator: the run's engine.
        step: its `evaluate` and `summarize` measure.
        sets: batches by the name of the data set; that of a single one is empty.
        on_batch: called after each batch with its data set's batches and their count so far; what
            it raises, on every process alike, leaves the evaluation.
        limit: how many batches of each are measured; None: all.
        metrics: of the recipe, by name; one named as a metric of the step replaces it.

    Raises:
        ConfigError: if the values are not per sample.
    """
    all_found: dict[str, float] = {}
    samples = SampleMetrics(metrics or {}, accelerator, step)
    with preserved(), evaluation_mode(step), torch.no_grad():
        for name, batches in sets.items():
            values = _measure(accelerator, step, batches, on_batch, limit, samples)
            found = checked_metrics(_measuring(step), step.summarize(values)) | samples.computed()
            all_found |= {f"{name}/{key}" if name else key: value for key, value in found.items()}
    # Sums of floats on several devices may differ in the last bit; decisions must not.
    shared = [all_found]
    if accelerator.num_processes > 1:
        broadcast_object_list(shared)
    return shared[0]


def _measure(
    accelerator: Accelerator,
    step: Step,
    batches: EvalBatches,
    on_batch: Callable[[EvalBatches, int], None],
    limit: int | None,
    samples: SampleMetrics,
) -> dict[str, torch.Tensor]:
    """Return each value of all samples: [N, ...]."""
    parts: dict[str, list[torch.Tensor]] = {}
    for index, batch in enumerate(itertools.islice(batches, limit), start=1):
        with samples.seeing(batch):
            values = checked_tensors(_measuring(step), "evaluate", step.evaluate(batch))
        for name, value in accelerator.gather_for_metrics(values).items():
            parts.setdefault(name, []).append(value)
        on_batch(batches, index)
    found = {name: torch.cat(tensors) for name, tensors in parts.items()}
    _check_counts(step, found, batches.samples_within(limit))
    return found


def _measuring(step: Step) -> object:
    """Return the user's object that measures: the step's objective, or the step itself."""
    return getattr(step, "objective", step)


def _check_counts(step: Step, values: Mapping[str, torch.Tensor], num_samples: int | None) -> None:
    counts = {name: len(value) for name, value in values.items()}
    wanted = max(counts.values(), default=0) if num_samples is None else num_samples
    if wanted == 0 or set(counts.values()) != {wanted}:
        rule = f"it measures each of {wanted} samples"
        remedy = "Return one row per sample of the batch, [B, ...], from `evaluate`."
        name = type(_measuring(step)).__name__
        raise ConfigError.of(f"{name}.evaluate measured {counts}", rule, remedy)


def share_buffers(step: Step, accelerator: Accelerator) -> None:
    """Give each rank the buffers of rank 0, such as BatchNorm's statistics: checkpoints hold these.

    Of ranks that share a model's weights, each sees its own part of the data. Ranks of a pipeline
    stage take those of its first rank. Every process must call this together.
    """
    own = [
        buffer
        for model in step.models.values()
        for buffer in model.buffers()
        if buffer.is_floating_point() and not hasattr(buffer, "to_local")
    ]
    dims = accelerator.parallel_dims
    if dims.pp == 1:
        firsts = broadcast(own)
    else:
        rank = dims.rank_at({**dict.fromkeys(AXES, 0), PP: dims.coordinates[PP]})
        firsts = accelerator.comm.all_gather_object([buffer.cpu() for buffer in own])[rank]
    for buffer, first in zip(own, firsts, strict=True):
        buffer.data.copy_(first)


@contextmanager
def evaluation_mode(step: Step) -> Iterator[None]:
    """Switch the models (and optimizers that have modes) of `step` to evaluation and back."""
    modules = [module for model in step.models.values() for module in model.modules()]
    modes = [module.training for module in modules]
    for model in step.models.values():
        model.eval()
    try:
        with evaluation_weights(step):
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _check_weights(run: Run) -> None:
    """Refuse an optimizer with two sets of weights where it does not step those of the models."""
    known = {id(p) for model in run.step.models.values() for p in model.parameters()}
    for name, optimizer in run.step.optimizers.items():
        own = unwrap_optimizer(optimizer)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if hasattr(own, "train") and not stepped & known:
            raise ConfigError.of(
                f"{name}: {type(own).__name__} with {run.accelerator.plan.strategy}",
                "the engine steps other tensors than the models' weights, which evaluations use",
                "Choose optimizer=adamw, or another strategy.",
            )


@contextmanager
def evaluation_weights(step: Step) -> Iterator[None]:
    """Have the weights of evaluations in the models, where an optimizer keeps two sets."""
    switching = [o for o in step.optimizers.values() if hasattr(o, "eval") and hasattr(o, "train")]
    for optimizer in switching:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in switching:
            optimizer.train()


class Evaluations:
    """Evaluates the validation and the test data of a run, and updates its metrics, best and stop.

    A request to stop interrupts an evaluation. `improved`: no checkpoint says yet that the present
    state is among the best.
    """

    def __init__(
        self,
        run: Run,
        sets: Mapping[str, Mapping[str, EvalBatches]],
        plateaus: Sequence[ReduceLROnPlateau],
        recorder: Recorder,
    ) -> None:
        self._run, self._sets, self._plateaus, self._recorder = run, sets, plateaus, recorder
        self._metrics = build_metrics(run.recipe)
        _check_weights(run)
        self.improved = False

    def check(self, num_batches: int) -> None:
        """Measure a few batches before the first step, to find mistakes; nothing is recorded.

        The validation data are measured, or the test data where there are none.
        """
        run, progress = self._run, self._run.stop_flag.progress
        split = next((one for one in ("validation", "test") if self._sets[one]), None)
        if split is None:
            return

        try:
            with progress.in_phase("the check of the evaluation"), buffers_kept(run.step):
                sets = self._sets[split]
                metrics = evaluate_sets(
                    run.accelerator, run.step, sets, progress.batch, num_batches, self._metrics
                )
        except Exception as error:
            error.add_note(
                f"This was a short evaluation before the first step (trainer.sanity_steps="
                f"{num_batches}; 0: none)."
            )
            raise
        if split == "validation":
            self._monitored(metrics)
            run.notify("on_sanity_check", metrics)

    def _monitored(self, metrics: Mapping[str, float]) -> float:
        """Return the monitored metric.

        Raises:
            ConfigError: if it was not measured, or nothing says whether its best is the max.
        """
        run, settings = self._run, self._run.recipe.checkpoint
        value = monitored_value(metrics, run.monitor)
        if settings.mode is None and run.monitor.rpartition("/")[2] != run.step.monitor:
            rule = f"only of {run.step.monitor!r} it is known that its best is the {run.mode}"
            remedy = "Give checkpoint.mode=max or checkpoint.mode=min."
            raise ConfigError.of(f"checkpoint.monitor={run.monitor} without a mode", rule, remedy)
        return value

    def validate(self) -> None:
        """Evaluate the validation data once per step, and note whether the state is the best."""
        run, state = self._run, self._run.state
        if not self._sets["validation"] or state.step == state.evaluated_step:
            return
        metrics = self._evaluate("validation")
        if metrics is None:
            return
        value = self._monitored(metrics)
        state.evaluated_step = state.step
        if state.step:  # before the first step there is neither a state to keep nor a rate to lower
            keep = run.recipe.checkpoint.keep_best
            self.improved = state.rank(value, run.mode, max(1, keep)) and keep > 0
            for scheduler in self._plateaus:
                scheduler.step(value)
        self._report("validation", metrics, "best" if state.best_step == state.step else "")

    def test(self, step: int) -> None:
        """Evaluate the test data, if there is any, with the weights of `step`."""
        run = self._run
        if not self._sets["test"]:
            return
        metrics = self._evaluate("test")
        if metrics is not None:
            run.weights_step = step
            self._report("test", metrics, f"weights of step {step}", step)

    def _evaluate(self, split: str) -> dict[str, float] | None:
        """Return the metrics of a split; None if the evaluation was interrupted by a stop."""
        run, stop_flag = self._run, self._run.stop_flag

        def on_batch(batches: EvalBatches, index: int) -> None:
            run.display.evaluating(split, index, batches.num_batches)
            agreed = stop_flag.agreed(run.accelerator, "evaluation")
            if agreed and stop_flag.reason != TIME_IS_UP:
                raise Interrupted

        try:
            watched = run.watch.paused("evaluation")
            with watched, stop_flag.progress.in_phase(f"evaluation ({split})"):
                given = (run.accelerator, run.step, self._sets[split], on_batch)
                share_buffers(run.step, run.accelerator)
                run.notify("on_evaluation_start", split)
                try:
                    return evaluate_sets(*given, metrics=self._metrics)
                finally:
                    run.notify("on_evaluation_end", split)
        except Interrupted:
            run.stopped = Stop("signal", f"{stop_flag.reason} received in evaluation")
            return None

    def _report(
        self, split: str, metrics: dict[str, float], mark: str, weights_step: int | None = None
    ) -> None:
        run = self._run
        run.metrics[split] = metrics
        self._recorder.write(split, metrics, weights_step=weights_step)
        run.display.evaluation(split, run.state.step, run.state.epoch_number, metrics, mark)
        with run.stop_flag.progress.in_phase("on_evaluate"):
            run.notify("on_evaluate", split, dict(metrics))


@contextmanager
def buffers_kept(step: Step) -> Iterator[None]:
    """Restore the buffers of a step's models and of the modules that measure."""
    owners = [value for one in (step, _measuring(step)) for value in vars(one).values()]
    modules = {
        module: None
        for owner in (*step.models.values(), *owners)
        if isinstance(owner, torch.nn.Module)
        for module in owner.modules()
    }
    before = [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                buffer.copy_(value)
                setattr(module, name, buffer)
