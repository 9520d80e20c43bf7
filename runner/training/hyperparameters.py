"""Hyperparameters of optimizers, schedules and data, saved in a checkpoint beside their state.

A restored state dict overwrites the options of an optimizer that was just built. So each checkpoint
also records the options at construction; where a resumed run builds with other options, the recipe
has been changed, and the change is applied to the restored state, or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accel.machine.errors import ConfigError, Problem, Problems
from accel.machine.tree import recursively_apply
from runner.recipe.batch_plan import RunLength
from runner.recipe.serialization import to_plain
from runner.recipe.units import parse_duration

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from accel.config.handlers import GradScalerKwargs
    from runner.training.run import Run


# Options that schedules write.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
MOMENTA = ("betas", "momentum", "max_momentum", "base_momentum")
# Options of optimizers that may change although they are no plain numbers: any state fits them.
SWITCHES = ("name", "nesterov", "maximize", "foreach", "fused", "decoupled_weight_decay")
PLAIN = (bool, int, float, str, list, type(None))

Groups = list[dict[str, Any]]


class Hyperparameters:
    """Options of the optimizers, schedules and data, as the recipe has them now.

    Made from a run whose optimizers are prepared and have no schedules yet; `start` is called once
    they have. `saved` has what the restored checkpoint was written with.
    """

    def __init__(self, run: Run) -> None:
        recipe, limit = run.recipe, run.recipe.trainer.limit_eval_batches
        self._run = run
        self._built = {name: _options(o.param_groups) for name, o in run.step.optimizers.items()}
        self._start: dict[str, Groups] = {}
        measured = [recipe.data, recipe.objective, limit, run.monitor, run.mode]
        self._now: dict[str, Any] = {
            "options": self._built,
            "schedule": to_plain([recipe.scheduler, recipe.step, run.plan.total_steps]),
            "sizes": run.data.sizes(),
            "facts": dict(run.data.facts),
            "measured": to_plain(measured + ([recipe.metrics] if recipe.metrics else [])),
        }
        self.saved: dict[str, Any] = {}

    def start(self) -> None:
        """Record the options as the schedules set them before the first step."""
        optimizers = self._run.step.optimizers.items()
        self._start = {name: _options(optimizer.param_groups) for name, optimizer in optimizers}

    def state_dict(self) -> dict[str, object]:
        """Return the hyperparameters of the recipe, and the class and state of each schedule."""
        schedules = self._run.schedulers.items()
        made = {
            name: {"class": _class_of(one), "state": _stored(one.state_dict())}
            for name, one in schedules
        }
        return {**self._now, "schedules": made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the hyperparameters that the checkpoint was written with."""
        self.saved = dict(state)

    def resume(self) -> None:
        """Restore the schedules, and apply changes of the recipe since the checkpoint.

        Raises:
            ConfigError: if something has changed that the restored state does not fit.
        """
        run, state, problems = self._run, self._run.state, Problems()
        stop_after = run.recipe.trainer.stop_after
        if stop_after is not None and stop_after <= state.step:
            value, rule = f"trainer.stop_after={stop_after} with resume", "the run is at step "
            problems.add(value, f"{rule}{state.step}", "Give a later step, or leave it out.")
        before, now = self.saved["sizes"]["train"], self._now["sizes"]["train"]
        if state.samples_in_epoch and before != now:
            problems.add(
                f"training data of {now} samples with resume",
                f"the checkpoint is {state.samples_in_epoch} samples into an epoch of {before}, "
                "whose order is drawn over all of them",
                "Resume with the data that it was trained on, and change them from the end of an "
                "epoch on (trainer.stop_after=<step>), or start a new run.",
            )
        problems.raise_if()
        for name, fact in self.saved.get("facts", {}).items():
            if fact != (told := run.data.facts.get(name)):
                run.display.note(f"The data tells {name}={told}; the recipe was made with {fact}.")
        # Any changed argument counts, whether or not it affects the metrics.
        run.remeasured = any(self.saved[key] != self._now[key] for key in ("sizes", "measured"))
        for name, optimizer in run.step.optimizers.items():
            self._resume_one(name, optimizer)
        set_scaler(run.accelerator.scaler, run.recipe.precision.scaler)
        if run.remeasured and state.best is not None:
            run.display.note(
                f"The best state so far (step {state.best_step}) was measured with other options "
                f"of data, objective or monitor: the best {run.monitor} is reset."
            )
            state.top.clear()
            state.evaluated_step = -1

    def _resume_one(self, name: str, optimizer: Optimizer) -> None:
        """Restore the schedule of an optimizer, and give it the options of the recipe."""
        scheduler = self._run.schedulers.get(name)
        before, now = self.saved["options"].get(name, []), self._built[name]
        found = self.saved["schedules"].get(name)
        changed = [
            {key for key in new if key in old and old[key] != new[key]}
            for old, new in zip(before, now, strict=False)
        ]
        ConfigError.raise_if(_incompatible_options(changed, before, now))
        for group, new, options in zip(optimizer.param_groups, now, changed, strict=False):
            give(group, new, options - {"lr"})
        measures = isinstance(scheduler, ReduceLROnPlateau)
        follows = measures or getattr(scheduler, "follows_time", False)
        kind = None if scheduler is None else _class_of(scheduler)
        written = {"lr"} if scheduler is None or measures else {"lr", *MOMENTA}
        is_same = kind == (found and found["class"])
        num_compared = 2 if measures else 3  # a plateau does not depend on the number of steps
        is_same &= self.saved["schedule"][:num_compared] == self._now["schedule"][:num_compared]
        is_same &= not any(options & written for options in changed)
        if follows and (not is_same or (measures and self._run.remeasured)):
            source = "measurements" if measures else "time"
            raise ConfigError.of(
                f"other options of {kind} with resume",
                f"a schedule that follows {source} goes on from what it measured",
                "Resume with the optimizer.lr, scheduler, number of steps and data of before, or "
                "start a new run.",
            )
        if not is_same:
            self._replay(name, optimizer, scheduler)
        elif scheduler is not None:
            scheduler.load_state_dict(found["state"])

    def _replay(self, name: str, optimizer: Optimizer, scheduler: Any) -> None:
        """Give an optimizer the rates that it has at this step under the recipe of now."""
        for group, start in zip(optimizer.param_groups, self._start[name], strict=False):
            for key in RATES:
                group.pop(key, None) if key not in start else None
            give(group, start, (*RATES, *MOMENTA))
        if scheduler is not None:
            scheduler.optimizer._opt_called = True  # torch would warn: no step was made here
            for _ in range(self._run.state.step):
                scheduler.step()


def set_scaler(scaler: GradScaler | None, settings: GradScalerKwargs) -> None:
    """Give a restored gradient scaler the constants of the recipe; its scale is kept."""
    if scaler is None or not scaler.is_enabled():
        return
    scaler.set_growth_factor(settings.growth_factor)
    scaler.set_backoff_factor(settings.backoff_factor)
    scaler.set_growth_interval(settings.growth_interval)


def _class_of(scheduler: object) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"


def _options(groups: Groups) -> Groups:
    """Return the options of each group that are numbers, lists, switches or texts."""
    return [
        {
            name: plain
            for name, value in group.items()
            if name != "params" and isinstance(plain := _plain(value), PLAIN)
        }
        for group in groups
    ]


def _plain(value: Any) -> object:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value


def _stored(state: dict[str, Any]) -> Any:
    """Return the state of a schedule with plain numbers of steps, which files hold."""
    return recursively_apply(int, state, test_type=lambda value: isinstance(value, RunLength))


def give(group: dict[str, Any], options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Set the options of a group that are among `names`, in the types that the group has."""
    for name in names:
        if name in options:
            present, value = group.get(name), options[name]
            if isinstance(present, Tensor):  # a rate on the device: kernels hold on to it
                present.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _incompatible_options(changed: list[set[str]], before: Groups, now: Groups) -> list[Problem]:
    return [
        Problem(
            f"optimizer option {name}={new[name]} with resume",
            f"the saved optimizer state was made with {name}={old[name]} and does not fit "
            "the new value",
            f"Leave {name} out, or start a new run.",
        )
        for options, old, new in zip(changed, before, now, strict=False)
        for name in sorted(options.difference(SWITCHES))
        if not all(type(value) in (int, float, list) for value in (old[name], new[name]))
    ]


# -- schedules -----------------------------------------------------------------------------


def make_schedulers(run: Run) -> Mapping[str, LRScheduler]:
    """Return the schedules of a run's optimizers, by name.

    Raises:
        ConfigError: if they need the number of steps, and that is not known.
    """
    total_steps = run.plan.total_steps
    # A stream without trainer.max_steps has no known end to plan a schedule for.
    length = RunLength(total_steps or 1)
    length.steps_per_epoch = run.plan.steps_per_epoch
    length.mode = "max" if run.mode == "max" else "min"
    length.max_seconds = parse_duration(run.recipe.trainer.max_time)
    schedulers = run.step.make_schedulers(length)
    if schedulers and total_steps is None:
        raise ConfigError.of(
            "trainer.max_steps=null with a data set of unknown length",
            "a learning-rate schedule needs the number of steps",
            "Set trainer.max_steps, or scheduler=null for a constant rate.",
        )
    return schedulers


def find_plateaus(loop: Run) -> dict[str, ReduceLROnPlateau]:
    """Return the schedules that follow the run's metric.

    Raises:
        ConfigError: if the run has no validation data, or its best metric is of another mode.
    """
    found = {n: one for n, one in loop.schedulers.items() if isinstance(one, ReduceLROnPlateau)}
    for name, scheduler in found.items():
        loop.require_validation("scheduler ReduceLROnPlateau")
        if scheduler.mode != loop.mode:
            raise ConfigError.of(
                f"scheduler mode={scheduler.mode} of {name!r}",
                f"it follows {loop.monitor}, whose best is the {loop.mode}imum",
                f"Set scheduler.mode={loop.mode}, or checkpoint.mode={scheduler.mode}.",
            )
    return found
