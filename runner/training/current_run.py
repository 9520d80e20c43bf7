"""A run under way, as callbacks, the header and the summary read it. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from accel import Accelerator
    from runner.data.datasets import Data
    from runner.recipe.batch_plan import BatchPlan
    from runner.recipe.schema import Recipe
    from runner.training.checkpointing import Saver
    from runner.training.console import Display
    from runner.training.metrics import Stopwatch
    from runner.training.state import Stop, TrainState
    from runner.training.step import Step


class Run(Protocol):
    """The interface of the training loop for callbacks and for the runner's own reports.

    Attributes:
        recipe: the run's recipe.
        run_dir: its directory.
        accelerator: the engine.
        step: owns the models and optimizers.
        data: the data sets.
        plan: batch sizes, accumulation steps and the number of steps.
        resume_from: the checkpoint that training was resumed from; None: from the beginning.
        state: step, epoch and sample counters.
        stopped: why training ended; None before.
        monitor: metric by which states are compared.
        mode: whether its best is the "max" or the "min".
        metrics: the last evaluation of each split, by metric.
        weights_step: the step whose weights were tested; None: there was no test yet.
        remeasured: whether a resume changed the data or the objective that evaluations measure by.
        results: entries that callbacks add to summary.json.
        rows: (label, text) that callbacks add to the final table.
        schedulers: learning-rate schedulers, by the name of their optimizer.
        saver: writes checkpoints, and knows the best and the last.
        display: prints notes and tables, on rank 0.
        watch: measures the time spent on training.
        deadline: value of `time.monotonic` at which time is up; None: never.
        num_parameters: parameters of all models: (all, trainable).
        model_names: class names of the models.
    """

    recipe: Recipe
    run_dir: Path
    accelerator: Accelerator
    step: Step
    data: Data
    plan: BatchPlan
    resume_from: str | None
    state: TrainState
    stopped: Stop | None
    monitor: str
    mode: str
    metrics: dict[str, dict[str, float]]
    weights_step: int | None
    remeasured: bool
    results: dict[str, object]
    rows: list[tuple[str, str]]
    schedulers: Mapping[str, LRScheduler]
    saver: Saver
    display: Display
    watch: Stopwatch
    deadline: float | None
    num_parameters: tuple[int, int]
    model_names: list[str]

    @property
    def complete(self) -> bool:
        """Whether the run has reached its end, and is not only interrupted."""

    @property
    def seconds(self) -> float:
        """Time spent on the run in seconds, over all invocations."""

    @property
    def samples_here(self) -> int:
        """Samples trained on in this invocation, over all processes."""

    def stop(self, reason: str, kind: str = "callback") -> None:
        """End training at this step boundary. Every process must call this together.

        Args:
            reason: one sentence, for the summary.
            kind: `stopped` of the summary.
        """
