"""Values of a run: averaged between log points, written to metrics.jsonl and the trackers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from accel.machine.errors import AccelError, CheckpointError, Problem
from accel.machine.passwords import without_passwords
from accel.machine.tree import recursively_apply
from runner.runs.json_files import METRICS, WEIGHTS_STEP, MetricsFile, read_lines
from runner.training import media
from runner.training.step import TOKENS

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from runner.training.run import Run


class NonFiniteError(AccelError, ArithmeticError):
    """A value of a training step is infinite or not a number."""


class StepMeter:
    """Values per optimizer step; one reduction over processes and one read per `drain`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._waiting: dict[str, list[torch.Tensor]] = {}
        self._read: dict[str, list[float]] = {}

    def add(self, shares: Mapping[str, torch.Tensor]) -> None:
        """Keep this process's share of each value of one step, 0-d; never waits for the device."""
        for name, share in shares.items():
            self._waiting.setdefault(name, []).append(share.detach())

    def drain(self) -> None:
        """Sum the shares over processes and read them. Every process must call this together."""
        if not self._waiting:
            return
        names = sorted(self._waiting)
        shares = [share.float() for name in names for share in self._waiting[name]]
        values = iter(self._comm.all_reduce(torch.stack(shares), "sum").tolist())
        for name in names:
            count = len(self._waiting[name])
            self._read.setdefault(name, []).extend(next(values) for _ in range(count))
        self._waiting.clear()

    def sum_of(self, name: str) -> float:
        """Return the sum of a value over the steps that were read, and forget it."""
        return math.fsum(self._read.pop(name, ()))

    def check(self, step: int) -> None:
        """Raise if a value that was read is not finite; the optimizer step `step` was added last.

        Raises:
            NonFiniteError: naming the first such value and its step.
        """
        for name, values in self._read.items():
            for index, value in enumerate(values):
                if not math.isfinite(value):
                    problem = Problem(
                        f"{name}={value} at step {step - len(values) + 1 + index}",
                        "with trainer.stop_on_nan=true it must be finite",
                        "Lower the learning rate, set trainer.clip_grad_norm=1.0, or find the "
                        "operation with trainer.detect_anomaly=true; to go on regardless, set "
                        "trainer.stop_on_nan=false.",
                    )
                    raise NonFiniteError(str(problem))

    def take(self) -> dict[str, float]:
        """Return the mean of each value over the steps that were read, and forget them.

        Steps whose value is not finite are excluded and counted as ``<name>_nonfinite``.
        """
        means: dict[str, float] = {}
        for name, values in self._read.items():
            finite = [value for value in values if math.isfinite(value)]
            means[name] = math.fsum(finite) / len(finite) if finite else math.nan
            if len(finite) < len(values):
                means[f"{name}_nonfinite"] = float(len(values) - len(finite))
        self._read.clear()
        return means

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last `take`."""
        return not self._waiting and not self._read

    def state_dict(self) -> dict[str, list[float]]:
        """Return the values that the next log point averages, after `drain`."""
        if self._waiting:
            raise CheckpointError("StepMeter.state_dict before drain: values are on the device.")
        return {name: list(values) for name, values in self._read.items()}

    def load_state_dict(self, state: Mapping[str, Iterable[float]]) -> None:
        """Restore a state of `state_dict`."""
        self._waiting.clear()
        self._read = {name: list(values) for name, values in state.items()}


PURGING = ("tensorboard", "csv")  # trackers that take `purge_step`
# By tracker, the argument that names a run; the others name it after the project.
RUN_NAMES = {"mlflow": "run_name", "wandb": "name", "swanlab": "name", "trackio": "name"}


class Recorder:
    """Writes the values of one run; files on rank 0, trackers where the engine says.

    The values of steps are averaged between log points; only these read from the device.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.meter = StepMeter(run.accelerator.comm)
        self._samples = self._tokens = self._skipped_steps = 0  # the first: at the last log point
        self._rates: dict[str, float] = {}
        self._names: list[str] = []  # of a step's values on all ranks, where ranks have others
        self._file: MetricsFile | None = None
        self._early: list[dict[str, object]] | None = []
        self._resumed_at: int | None = None
        self._told: set[object] = set()  # splits that trackers have at the step that is resumed

    def open(self) -> None:
        """Open the trackers; those of a resumed run drop what was logged after its step."""
        run, recipe = self._run, self._run.recipe
        self._samples, self._tokens = run.state.samples, run.state.tokens
        if run.resume_from is not None:
            self._resumed_at = at = run.state.step
            lines = read_lines(run.run_dir / METRICS)
            self._told = {line.get("split") for line in lines if line.get("step") == at}
        project = recipe.tracker.project_name or recipe.name
        shown = recursively_apply(
            without_passwords, asdict(recipe), test_type=lambda value: isinstance(value, str)
        )
        run.accelerator.init_trackers(project, shown, self._tracker_arguments())

    def begin(self, tests: bool = False) -> None:
        """Open the file, once the first step is made: until then it stays as it was.

        What was measured before that is written now, in place of an earlier measurement at the
        same step; and so will be the test, if the run `tests` without a further step.
        """
        early, self._early = self._early or [], None
        if self._run.accelerator.is_main_process:
            if self._resumed_at is not None:
                media.remove_later(self._run.run_dir, self._resumed_at)
            repeated = {str(record["split"]) for record in early} | ({"test"} if tests else set())
            self._file = MetricsFile(self._run.run_dir, self._resumed_at, repeated)
            for record in early:
                self._file.write(record)

    def add(self, values: dict[str, torch.Tensor]) -> None:
        """Add this rank's shares of the values of a step, before the step is counted."""
        run, comm = self._run, self._run.accelerator.comm
        if run.accelerator.parallel_dims.pp > 1:  # an objective's values are on the last stage
            if not self._names:
                self._names = sorted(set().union(*comm.all_gather_object(list(values))))
            zero = torch.zeros((), device=run.accelerator.device)
            values = {name: values.get(name, zero) for name in self._names}
        if run.accelerator.optimizer_step_was_skipped:
            self._skipped_steps += 1
            values.pop("grad_norm", None)  # infinite or not a number, and nothing is wrong
        self.meter.add(values)
        if run.logs_at(run.state.step + 1):  # the rates of this step, not of the next
            self._rates = learning_rates(run.step.optimizers)

    def drain(self) -> None:
        """Read the values of the steps since the last read; the one wait for the device."""
        self.meter.drain()
        self._run.speed.read()
        self._run.state.tokens += round(self.meter.sum_of(TOKENS))
        if self._run.recipe.trainer.stop_on_nan:
            self.meter.check(self._run.state.step)

    def log(self) -> dict[str, float]:
        """Write the means since the last log point, show them, and return them."""
        self.drain()
        run, values = self._run, self.meter.take()
        samples, tokens = run.state.samples - self._samples, run.state.tokens - self._tokens
        self._samples, self._tokens = run.state.samples, run.state.tokens
        of_run: dict[str, float] = {}
        if self._skipped_steps:
            of_run["skipped_steps"], self._skipped_steps = float(self._skipped_steps), 0
        of_run |= self._rates or learning_rates(run.step.optimizers)
        self._rates = {}
        of_run |= run.speed.lap(samples, tokens) | run.values
        run.values = {}
        if tokens:
            of_run[TOKENS] = run.state.tokens
        self.write("train", values, of_run)
        values |= of_run
        run.display.values(values)
        return values

    def write(
        self,
        split: str,
        values: Mapping[str, float],
        of_run: Mapping[str, float] | None = None,
        weights_step: int | None = None,
    ) -> None:
        """Write the values of a log point or of an evaluation.

        Args:
            split: whose they are.
            values: as measured; trackers get them under ``<split>/<name>``.
            of_run: values that belong to no split; trackers get them under their own names.
            weights_step: the step whose weights were measured; None: the present ones.
        """
        run, state, common = self._run, self._run.state, dict(of_run or {})
        where = {"step": state.step, "epoch": state.epoch_number, "samples": state.samples}
        if weights_step is not None:
            where[WEIGHTS_STEP] = weights_step
        record = {**where, "split": split, **values, **common, "time": round(run.seconds, 3)}
        if self._early is not None:
            self._early.append(record)
        elif self._file is not None:
            self._file.write(record)
        if state.step != self._resumed_at or split not in self._told:
            named = {f"{split}/{name}": value for name, value in values.items()} | common
            run.accelerator.log(named, step=state.step)

    def close(self) -> None:
        """Close the file. Trackers are closed by the engine, with the run's processes."""
        if self._file is not None:
            self._file.close()

    def _tracker_arguments(self) -> dict[str, dict[str, Any]]:
        """Return the trackers' arguments.

        A run has the name of its directory there, or a folder below it. Those that can drop
        records after a resumed step do.
        """
        run, own = self._run, dict[str, dict[str, Any]]()
        if self._resumed_at is None:
            own = {name: {argument: run.run_dir.name} for name, argument in RUN_NAMES.items()}
        else:
            own = {name: {"purge_step": self._resumed_at + 1} for name in PURGING}
        own["dvclive"] = {"dir": str(run.run_dir / "dvclive")}  # else each run removes the last one
        given = run.recipe.tracker.init_kwargs
        return {n: {**own.get(n, {}), **given.get(n, {})} for n in {**own, **given}}


def learning_rates(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, float]:
    """Return `lr`, the first rate of the first optimizer, and those that differ from it.

    Of several optimizers they are `lr_<optimizer>`; of several groups, `lr_<group>` by its `name`
    or, where rates differ, its number; of both, `lr_<optimizer>_<group>`.
    """
    rates: dict[str, float] = {}
    with_rates = {
        name: [group for group in optimizer.param_groups if "lr" in group]
        for name, optimizer in optimizers.items()
    }
    with_rates = {name: groups for name, groups in with_rates.items() if groups}
    for name, groups in with_rates.items():
        prefix = f"lr_{name}" if len(with_rates) > 1 else "lr"
        rates.setdefault("lr", float(groups[0]["lr"]))
        rates[prefix] = float(groups[0]["lr"])
        differ = len({float(group["lr"]) for group in groups}) > 1
        for number, group in enumerate(groups):
            if differ or "name" in group:
                rates[f"{prefix}_{group.get('name', number)}"] = float(group["lr"])
    return rates
