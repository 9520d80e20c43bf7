"""Where values go: metrics.jsonl and the trackers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from runner.run_dir.json_files import WEIGHTS_STEP, MetricsFile

if TYPE_CHECKING:
    import torch

    from accel import Accelerator
    from runner.recipe.schema import Recipe

logger = logging.getLogger(__name__)

# Names of what the run itself writes; a value of the user's of such a name gets another.
RESERVED = (
    *("step", "epoch", "samples", "split", WEIGHTS_STEP, "time"),
    *("lr", "samples_per_second", "skipped_steps"),
)
PURGING = ("tensorboard", "csv")  # trackers that take `purge_step`
# By tracker, the argument that names a run; the others name it after the project.
RUN_NAMES = {"mlflow": "run_name", "wandb": "name", "swanlab": "name", "trackio": "name"}


class Position(Protocol):
    """Where a run stands, as its values are logged with."""

    @property
    def step(self) -> int:
        """Optimizer steps made."""

    @property
    def samples(self) -> int:
        """Samples trained on, over all processes and epochs."""

    @property
    def epoch_number(self) -> int:
        """The epoch that the last step belongs to, counted from 1; 0 before the first step."""


class Recorder:
    """Writes the values of one run; files on rank 0, trackers where the engine says."""

    def __init__(
        self, accelerator: Accelerator, recipe: Recipe, run_dir: Path, state: Position
    ) -> None:
        self._accelerator = accelerator
        self._recipe = recipe
        self._run_dir = run_dir
        self._state = state
        self._file: MetricsFile | None = None
        self._early: list[dict[str, object]] | None = []
        self._resumed_at: int | None = None
        self._renamed: set[str] = set()

    def open(self, resumed: bool) -> None:
        """Open the trackers; where the run is resumed (from `state`), later records are removed."""
        recipe = self._recipe
        self._resumed_at = self._state.step if resumed else None
        project = recipe.tracker.project_name or recipe.name
        arguments = self._tracker_arguments(resumed)
        self._accelerator.init_trackers(project, asdict(recipe), arguments)

    def begin(self) -> None:
        """Open the file, once the first step is made: until then it stays as it was."""
        early, self._early = self._early or [], None
        if self._accelerator.is_main_process:
            self._file = MetricsFile(self._run_dir, self._resumed_at)
            for record in early:
                self._file.write(record)

    def write(
        self,
        split: str,
        values: Mapping[str, float],
        seconds: float,
        of_run: Mapping[str, float] | None = None,
        weights_step: int | None = None,
    ) -> None:
        """Write the values of a log point or of an evaluation.

        Args:
            split: whose they are.
            values: as measured; trackers get them under ``<split>/<name>``, and the file with a
                name of the run's own as ``<name>_value``.
            seconds: since the run began.
            of_run: values that belong to no split; trackers get them under their own names.
            weights_step: the step whose weights were measured; None: the present ones.
        """
        state, common = self._state, dict(of_run or {})
        where = {"step": state.step, "epoch": state.epoch_number, "samples": state.samples}
        if weights_step is not None:
            where[WEIGHTS_STEP] = weights_step
        own = self.renamed(values, common)
        record = {**where, "split": split, **own, **common, "time": round(seconds, 3)}
        if self._early is not None:
            self._early.append(record)
        elif self._file is not None:
            self._file.write(record)
        named = {f"{split}/{name}": value for name, value in values.items()} | common
        self._accelerator.log(named, step=state.step)

    def renamed(self, values: Mapping[str, float], of_run: Mapping[str, float]) -> dict[str, float]:
        """Return values by names that neither `of_run` nor the run's records have."""
        found: dict[str, float] = {}
        for name, value in values.items():
            other = name
            while other in RESERVED or other in of_run or (other != name and other in values):
                other = f"{other}_value"
            found[other] = value
            if other != name and name not in self._renamed:
                self._renamed.add(name)
                logger.warning(
                    "The run writes a value of its own as %s: yours is in metrics.jsonl as %s.",
                    name,
                    other,
                )
        return found

    def close(self) -> None:
        """Close the file. Trackers are closed by the engine, with the run's processes."""
        if self._file is not None:
            self._file.close()

    def _tracker_arguments(self, resumed: bool) -> dict[str, dict[str, Any]]:
        """Return the trackers' arguments.

        A run has the name of its directory there, or a folder below it. Those that can drop
        records after a resumed step do.
        """
        given = self._recipe.tracker.init_kwargs
        arguments = {name: dict(values) for name, values in given.items()}
        names = [choice.name for choice in self._accelerator.log_with]
        for name in PURGING:
            if resumed and name in names:
                arguments.setdefault(name, {}).setdefault("purge_step", self._state.step + 1)
        if "dvclive" in names:  # or each run would remove the one before it
            arguments.setdefault("dvclive", {}).setdefault("dir", str(self._run_dir / "dvclive"))
        for name, argument in RUN_NAMES.items():
            if not resumed and name in names:
                arguments.setdefault(name, {}).setdefault(argument, self._run_dir.name)
        return arguments


def learning_rates(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, float]:
    """Return `lr`, the first rate of the first optimizer; of several optimizers `lr_<name>` too."""
    groups = {name: optimizer.param_groups[0] for name, optimizer in optimizers.items()}
    rates = {name: float(group["lr"]) for name, group in groups.items() if "lr" in group}
    if not rates:
        return {}
    named = {f"lr_{name}": rate for name, rate in rates.items()} if len(rates) > 1 else {}
    return {"lr": next(iter(rates.values())), **named}
