"""Hyperparameters of optimizers, schedules and data, saved in a checkpoint beside their state.

A restored state dict overwrites the options of an optimizer that was just built. So each checkpoint
also records the options at construction; where a resumed run builds with other options, the recipe
has been changed, and the change is applied to the restored state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accel.machine.errors import ConfigError, Problem
from runner.recipe.serialization import to_plain

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from accel.config.handlers import GradScalerKwargs
    from runner.data.datasets import Data
    from runner.recipe.schema import Recipe
    from runner.training.run import Run
    from runner.training.step import Step


# Options that schedules write.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
MOMENTA = ("betas", "momentum", "max_momentum", "base_momentum")
# Options of optimizers that may change although they are no plain numbers: any state fits them.
SWITCHES = ("nesterov", "maximize", "foreach", "fused", "decoupled_weight_decay")

Groups = list[dict[str, Any]]


class Hyperparameters:
    """Options of the optimizers, schedule and sizes of the data, as the recipe has them now.

    The step's optimizers are prepared, and have no schedules yet; `monitored` is the (metric, mode)
    by which states are compared. `saved` has the same of the restored checkpoint. `parts` are the
    schedulers as they are saved, by the name of their optimizer.
    """

    def __init__(
        self,
        recipe: Recipe,
        step: Step,
        data: Data,
        total_steps: int | None,
        monitored: tuple[str, str],
    ) -> None:
        self.built = {name: _options(opt.param_groups) for name, opt in step.optimizers.items()}
        self.now: dict[str, Any] = {
            "options": self.built,
            "schedule": to_plain([recipe.scheduler, recipe.step, total_steps]),
            "samples": data.sizes(),
            "monitored": list(monitored),
            "measured": to_plain(
                [recipe.data, recipe.objective, recipe.trainer.limit_eval_batches]
            ),
        }
        self.saved: dict[str, Any] = {}
        self._scheduled: dict[str, Groups] = {}
        self._schedules: dict[str, dict[str, object]] = {}
        self.parts: dict[str, ScheduleState] = {}

    def scheduled(self, step: Step, schedulers: Mapping[str, LRScheduler]) -> None:
        """Record the options and schedules as they are before the first step."""
        self._scheduled = {
            name: _options(optimizer.param_groups) for name, optimizer in step.optimizers.items()
        }
        self._schedules = {
            name: state_of(scheduler)
            for name, scheduler in schedulers.items()
            if is_replayed(scheduler)
        }
        self.parts = {name: ScheduleState(scheduler) for name, scheduler in schedulers.items()}

    def knows(self, part: str) -> bool:
        """Return whether `resume` has brought a part that has no state to where it should be."""
        name = part.removeprefix("scheduler.")
        return name != part and name in self._schedules

    def state_dict(self) -> dict[str, object]:
        """Return the hyperparameters of the recipe, as plain values."""
        return self.now

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the hyperparameters that the checkpoint was written with."""
        self.saved = dict(state)

    def resume(self, loop: Run) -> None:
        """Apply changes of the recipe since the checkpoint to a restored loop.

        Raises:
            ConfigError: if something has changed that the restored state does not fit.
        """
        state = loop.state
        ended = limit_problems(loop.recipe.trainer.stop_after, state.step)
        ConfigError.raise_if([*ended, *self.data_problems(state.samples_in_epoch)])
        self.apply(loop.step, loop.schedulers, state.step)
        set_scaler(loop.accelerator.scaler, loop.recipe.precision.scaler)
        for note in self.notes():
            loop.display.note(note)
        if self.monitors_differently and state.best is not None:
            other = "other options of data or objective" * self.measures_differently
            loop.display.note(
                f"The best state so far (step {state.best_step}) was found with "
                f"{other or 'another metric'}: the best {loop.monitor} is reset."
            )
            state.best = state.best_step = None
            state.evaluated_step = -1
        for name, part in self.parts.items():
            if part.reset_best(self.monitors_differently):
                loop.display.note(
                    f"The schedule of {name!r} monitored another metric: its best value is reset."
                )

    def apply(self, step: Step, schedulers: Mapping[str, LRScheduler], num_steps: int) -> None:
        """Apply changes of the recipe since the checkpoint to the restored state.

        Schedulers are by the name of their optimizer. `num_steps`, the optimizer steps made, is for
        schedules that the checkpoint does not know.

        Raises:
            ConfigError: if an option has changed that the restored state does not fit.
        """
        another = self.saved["schedule"] != self.now["schedule"]
        for name, optimizer in step.optimizers.items():
            before = self.saved["options"].get(name)
            if before is None or len(before) != len(self.built[name]):
                continue
            changed = [
                _changes(old, new) for old, new in zip(before, self.built[name], strict=True)
            ]
            ConfigError.raise_if(_incompatible_options(changed, before, self.built[name]))
            for group, new, options in zip(
                optimizer.param_groups, self.built[name], changed, strict=True
            ):
                _give(group, new, options - {"lr"})
            scheduler = schedulers.get(name)
            scheduled = {"lr", "betas", "momentum"} if is_replayed(scheduler) else {"lr"}
            part = self.parts.get(name)
            replaced = part is not None and part.replaced
            if another and part is not None:
                part.reconfigure()
            if another or replaced or any(options & scheduled for options in changed):
                self._set_rates(name, optimizer, scheduler, before, num_steps)

    def _set_rates(
        self, name: str, optimizer: Optimizer, scheduler: Any, before: Groups, num_steps: int
    ) -> None:
        """Give an optimizer the rates that it has after `num_steps` under the recipe of now."""
        groups = optimizer.param_groups
        if scheduler is None:
            for group, new in zip(groups, self.built[name], strict=True):
                group.pop("initial_lr", None)
                _give(group, new, ("lr", *MOMENTA))
            return
        if not is_replayed(scheduler):
            # It monitors a metric, or is no schedule of torch's: its change of the rate so far is
            # applied to the new rate, too.
            for group, old, new in zip(groups, before, self.built[name], strict=True):
                if "lr" in new and old.get("lr"):
                    group["lr"] = group["lr"] * (new["lr"] / old["lr"])
            return
        followed = self.parts[name].num_steps
        made = num_steps if followed is None else followed
        for group, start in zip(groups, self._scheduled[name], strict=True):
            _give(group, start, (*RATES, *MOMENTA))
        scheduler.load_state_dict(copy.deepcopy(self._schedules[name]))
        scheduler.optimizer._opt_called = True  # torch would warn: no step was made here
        for _ in range(made):
            scheduler.step()

    def data_problems(self, samples_in_epoch: int) -> list[Problem]:
        """Return why a run cannot resume within an epoch of other training data."""
        if samples_in_epoch == 0:
            return []
        before, now = self.saved["samples"]["train"], self.now["samples"]["train"]
        if before == now:
            return []
        return [
            Problem(
                f"training data of {_size_text(now)} with resume",
                f"the checkpoint is {samples_in_epoch} samples into an epoch of "
                f"{_size_text(before)}, whose order is drawn over all of them",
                "Resume with the data that it was trained on, and change them from the end of an "
                "epoch on (trainer.stop_after=<step>), or start a new run.",
            )
        ]

    def notes(self) -> list[str]:
        """Return notes on changes of the data."""
        before, now = self.saved["samples"], self.now["samples"]
        return [
            f"The {name} data have {_size_text(now[name])}; so far the run had "
            f"{_size_text(before[name])}."
            for name in before.keys() & now.keys()
            if now[name] != before[name]
        ]

    @property
    def measures_differently(self) -> bool:
        """Whether the validation data or the objective are others than in the checkpoint.

        Any changed argument counts, whether or not it affects the metrics.
        """
        before, now = (
            {name: size for name, size in one["samples"].items() if name.startswith("validation")}
            for one in (self.saved, self.now)
        )
        return before != now or self.saved["measured"] != self.now["measured"]

    @property
    def monitors_differently(self) -> bool:
        """Whether states are compared by another metric than when the checkpoint was written."""
        return self.measures_differently or self.saved["monitored"] != self.now["monitored"]


def limit_problems(stop_after: int | None, step: int) -> list[Problem]:
    """Return the problem that a resumed run is past the step at which it is to stop."""
    if stop_after is None or stop_after > step:
        return []
    value, rule = f"trainer.stop_after={stop_after} with resume", f"the run is at step {step}"
    return [Problem(value, rule, "Give a later step, or leave it out.")]


def set_scaler(scaler: GradScaler | None, settings: GradScalerKwargs) -> None:
    """Give a restored gradient scaler the constants of the recipe; its scale is kept."""
    if scaler is None or not scaler.is_enabled():
        return
    scaler.set_growth_factor(settings.growth_factor)
    scaler.set_backoff_factor(settings.backoff_factor)
    scaler.set_growth_interval(settings.growth_interval)


def _options(groups: Groups) -> Groups:
    found = []
    for group in groups:
        plain = {name: _plain(value) for name, value in group.items() if name != "params"}
        found.append({name: value for name, value in plain.items() if value is not _UNKNOWN})
    return found


_UNKNOWN = object()


def _plain(value: Any) -> object:
    if isinstance(value, (list, tuple)):
        inner = [_plain(item) for item in value]
        return _UNKNOWN if any(item is _UNKNOWN for item in inner) else inner
    if hasattr(value, "numel") and value.numel() == 1:
        return float(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN


def _give(group: dict[str, Any], options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Set the options of a group that are among `names`, in the types that the group has."""
    for name in names:
        if name in options:
            present, value = group.get(name), options[name]
            if isinstance(present, Tensor):  # a rate on the device: kernels hold on to it
                present.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> set[str]:
    return {name for name in now if name in before and before[name] != now[name]}


def _incompatible_options(changed: list[set[str]], before: Groups, now: Groups) -> list[Problem]:
    problems = {}
    for options, old, new in zip(changed, before, now, strict=True):
        for name in sorted(options):
            if name in SWITCHES or _are_numbers(old[name], new[name]):
                continue
            problems[name] = Problem(
                f"optimizer option {name}={new[name]} with resume",
                f"the saved optimizer state was made with {name}={old[name]} and does not fit "
                "the new value",
                f"Leave {name} out, or start a new run.",
            )
    return list(problems.values())


def _are_numbers(*values: object) -> bool:
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return all(isinstance(item, Number) and not isinstance(item, bool) for item in flat)


def _size_text(size: int | None) -> str:
    return "unknown length" if size is None else f"{size:,} samples"


# Measurements in the state of a ReduceLROnPlateau; the rest are its options.
MEASURED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")


class ScheduleState:
    """A scheduler as a part of a checkpoint: it ignores the state of another class of scheduler.

    `replaced`: the restored state was of another class, and was ignored. The restored schedule had
    followed `num_steps` optimizer steps; None: it followed measurements, or nothing was restored.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        options = state_of(scheduler) if isinstance(scheduler, ReduceLROnPlateau) else {}
        self._fresh = {name: value for name, value in options.items() if name not in MEASURED}
        self.replaced = False
        self.num_steps: int | None = None
        self._restored_mode: str | None = None

    def state_dict(self) -> dict[str, object]:
        """Return the scheduler's state, its class, and how many steps it has followed."""
        kind, steps = type(self._scheduler), getattr(self._scheduler, "last_epoch", None)
        return {
            "state": self._scheduler.state_dict(),
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "num_steps": steps if is_replayed(self._scheduler) else None,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the scheduler, if the state is that of its class."""
        self.replaced = saved["class"] != self.state_dict()["class"]
        self.num_steps = saved["num_steps"]
        if self.replaced:
            return
        state = dict(saved["state"])
        if self._fresh:  # the mode is the run's, whatever it was when the state was saved
            self._restored_mode = state.pop("mode")
        self._scheduler.load_state_dict(state)

    def reconfigure(self) -> None:
        """Restore the recipe's options of a scheduler that monitors a metric."""
        if self._fresh and not self.replaced:
            self._scheduler.load_state_dict(self._fresh)

    def reset_best(self, remeasured: bool) -> bool:
        """Reset a scheduler's best if its metric is `remeasured`; return whether it was reset."""
        scheduler = self._scheduler
        if not isinstance(scheduler, ReduceLROnPlateau) or self._restored_mode is None:
            return False
        if not remeasured and scheduler.mode == self._restored_mode:
            return False
        scheduler.best = math.inf if scheduler.mode == "min" else -math.inf
        scheduler.num_bad_epochs = 0
        return True


def is_replayed(scheduler: object) -> bool:
    """Return whether the rates of a scheduler depend only on the number of steps."""
    return isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)


def state_of(scheduler: LRScheduler) -> dict[str, Any]:
    """Return a copy of the state dict of a scheduler."""
    return copy.deepcopy(dict(scheduler.state_dict()))
