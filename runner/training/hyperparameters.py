"""Hyperparameters of optimizers, schedules and data, saved in a checkpoint beside their state.

A restored state dict overwrites the options of an optimizer that was just built. So each checkpoint
also records the options at construction; where a resumed run builds with other options, the recipe
has been changed, and the change is applied to the restored state, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accel.machine.errors import ConfigError, Problem, Problems
from runner.recipe.serialization import to_plain

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from accel.config.handlers import GradScalerKwargs
    from runner.training.run import Run
    from runner.training.step import Step


# Options that schedules write.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
MOMENTA = ("betas", "momentum", "max_momentum", "base_momentum")
# Options of optimizers that may change although they are no plain numbers: any state fits them.
SWITCHES = ("nesterov", "maximize", "foreach", "fused", "decoupled_weight_decay")

Groups = list[dict[str, Any]]


class Hyperparameters:
    """Options of the optimizers, schedules and sizes of the data, as the recipe has them now.

    Made from a run whose optimizers are prepared and have no schedules yet; `start` is called once
    they have. `saved` has what the restored checkpoint was written with.
    """

    def __init__(self, run: Run) -> None:
        recipe = run.recipe
        self._run = run
        self._built = {name: _options(o.param_groups) for name, o in run.step.optimizers.items()}
        self._start: dict[str, Groups] = {}
        self._now: dict[str, Any] = {
            "options": self._built,
            "schedule": to_plain([recipe.scheduler, recipe.step, run.plan.total_steps]),
            "samples": run.data.sizes(),
            "monitored": [run.monitor, run.mode],
            "measured": to_plain(
                [recipe.data, recipe.objective, recipe.trainer.limit_eval_batches]
            ),
        }
        self.saved: dict[str, Any] = {}

    def start(self) -> None:
        """Record the options as the schedules set them before the first step."""
        optimizers = self._run.step.optimizers.items()
        self._start = {name: _options(optimizer.param_groups) for name, optimizer in optimizers}

    def state_dict(self) -> dict[str, object]:
        """Return the hyperparameters of the recipe, and the class and state of each schedule."""
        schedules = {
            name: {
                "class": _class_of(one),
                "state": one.state_dict(),
                "num_steps": one.last_epoch if _follows_steps(one) else None,
            }
            for name, one in self._run.schedulers.items()
        }
        return {**self._now, "schedules": schedules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the hyperparameters that the checkpoint was written with."""
        self.saved = dict(state)

    def resume(self) -> None:
        """Restore the schedules, and apply changes of the recipe since the checkpoint.

        Raises:
            ConfigError: if something has changed that the restored state does not fit.
        """
        run, state = self._run, self._run.state
        problems = Problems()
        stop_after = run.recipe.trainer.stop_after
        if stop_after is not None and stop_after <= state.step:
            value, rule = f"trainer.stop_after={stop_after} with resume", "the run is at step "
            problems.add(value, f"{rule}{state.step}", "Give a later step, or leave it out.")
        problems += self._data_problems(state.samples_in_epoch)
        problems.raise_if()
        for name, optimizer in run.step.optimizers.items():
            self._resume_one(name, optimizer)
        set_scaler(run.accelerator.scaler, run.recipe.precision.scaler)
        if self._monitors_differently and state.best is not None:
            other = "other options of data or objective" * self.measures_differently
            run.display.note(
                f"The best state so far (step {state.best_step}) was found with "
                f"{other or 'another metric'}: the best {run.monitor} is reset."
            )
            state.best = state.best_step = None
            state.evaluated_step = -1

    def _resume_one(self, name: str, optimizer: Optimizer) -> None:
        """Restore the schedule of an optimizer, and give it the options of the recipe."""
        scheduler: Any = self._run.schedulers.get(name)
        before, now = self.saved["options"].get(name, []), self._built[name]
        found = self.saved["schedules"].get(name)
        changed = [
            {key for key in new if key in old and old[key] != new[key]}
            for old, new in zip(before, now, strict=False)
        ]
        ConfigError.raise_if(_incompatible_options(changed, before, now))
        for group, new, options in zip(optimizer.param_groups, now, changed, strict=False):
            _give(group, new, options - {"lr"})
        kind = None if scheduler is None else _class_of(scheduler)
        scheduled = {"lr", *MOMENTA} if _follows_steps(scheduler) else {"lr"}
        is_same = kind == (found and found["class"])
        is_same &= self.saved["schedule"] == self._now["schedule"]
        is_same &= not any(options & scheduled for options in changed)
        followed = None if found is None else found["num_steps"]
        measures = scheduler is not None and not _follows_steps(scheduler)
        if measures and (not is_same or self._monitors_differently):
            raise ConfigError.of(
                f"other options of {kind} with resume",
                "a schedule that follows measurements goes on from what it measured",
                "Resume with the optimizer.lr, scheduler and data of before, or start a new run.",
            )
        if not is_same:
            made = self._run.state.step if followed is None else followed
            self._replay(name, optimizer, scheduler, made)
        elif scheduler is not None and found is not None:
            scheduler.load_state_dict(found["state"])

    def _replay(self, name: str, optimizer: Optimizer, scheduler: Any, num_steps: int) -> None:
        """Give an optimizer the rates that it has after `num_steps` under the recipe of now."""
        for group, start in zip(optimizer.param_groups, self._start[name], strict=False):
            for key in RATES:
                group.pop(key, None) if key not in start else None
            _give(group, start, (*RATES, *MOMENTA))
        if scheduler is not None:
            scheduler.optimizer._opt_called = True  # torch would warn: no step was made here
            for _ in range(num_steps):
                scheduler.step()

    def _data_problems(self, samples_in_epoch: int) -> list[Problem]:
        """Return why a run cannot resume within an epoch of other training data."""
        before, now = self.saved["samples"]["train"], self._now["samples"]["train"]
        if samples_in_epoch == 0 or before == now:
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

    @property
    def measures_differently(self) -> bool:
        """Whether the validation data or the objective are others than in the checkpoint.

        Any changed argument counts, whether or not it affects the metrics.
        """
        before, now = (
            {name: size for name, size in one["samples"].items() if name.startswith("validation")}
            for one in (self.saved, self._now)
        )
        return before != now or bool(self.saved["measured"] != self._now["measured"])

    @property
    def _monitors_differently(self) -> bool:
        """Whether states are compared by another metric than when the checkpoint was written."""
        return self.measures_differently or self.saved["monitored"] != self._now["monitored"]


def set_scaler(scaler: GradScaler | None, settings: GradScalerKwargs) -> None:
    """Give a restored gradient scaler the constants of the recipe; its scale is kept."""
    if scaler is None or not scaler.is_enabled():
        return
    scaler.set_growth_factor(settings.growth_factor)
    scaler.set_backoff_factor(settings.backoff_factor)
    scaler.set_growth_interval(settings.growth_interval)


def _follows_steps(scheduler: object) -> bool:
    """Return whether the rates of a scheduler depend only on the number of steps."""
    return isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)


def _class_of(scheduler: object) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"


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


def _incompatible_options(changed: list[set[str]], before: Groups, now: Groups) -> list[Problem]:
    problems = {}
    for options, old, new in zip(changed, before, now, strict=False):
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


# -- schedules -----------------------------------------------------------------------------


def make_schedulers(step: Step, total_steps: int | None) -> Mapping[str, LRScheduler]:
    """Return the schedules of a step's optimizers, by name.

    Raises:
        ConfigError: if they need the number of steps, and that is not known.
    """
    # A stream without trainer.max_steps has no known end to plan a schedule for.
    schedulers = step.make_schedulers(total_steps or 1)
    if schedulers and total_steps is None:
        raise ConfigError.of(
            "trainer.max_steps=null with a data set of unknown length",
            "a learning-rate schedule needs the number of steps",
            "Set trainer.max_steps, or scheduler=null for a constant rate.",
        )
    return schedulers


def find_plateaus(loop: Run) -> dict[str, ReduceLROnPlateau]:
    """Return the schedules that follow the run's metric, in the mode in which it improves.

    Raises:
        ConfigError: if the run has no validation data, or the recipe gives another mode.
    """
    found = {n: one for n, one in loop.schedulers.items() if isinstance(one, ReduceLROnPlateau)}
    for name, scheduler in found.items():
        if not loop.data.sets("validation"):
            raise ConfigError.of(
                "scheduler ReduceLROnPlateau without validation data",
                "it follows a validation metric",
                "Give the data set a validation part, or choose another scheduler.",
            )
        if scheduler.mode == loop.mode:
            continue
        node = loop.recipe.scheduler
        # "max" is nobody's default; "min" counts as given only where the recipe says so.
        if scheduler.mode == "max" or (isinstance(node, Mapping) and "mode" in node):
            raise ConfigError.of(
                f"scheduler mode={scheduler.mode} of {name!r}",
                f"it follows {loop.monitor}, whose best is the {loop.mode}imum",
                f"Leave it out, or set checkpoint.mode={scheduler.mode}.",
            )
        worst = math.inf if loop.mode == "min" else -math.inf
        scheduler.load_state_dict({"mode": loop.mode, "best": worst})
    return found
