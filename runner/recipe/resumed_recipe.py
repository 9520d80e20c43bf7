"""What a resumed run keeps of its recipe, and what the new command line changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel.machine.errors import Problem, Problems

# These say when one invocation stops; a resumed run does not inherit them.
PER_INVOCATION = (("resume",), ("run_dir",), ("trainer", "stop_after"), ("trainer", "max_time"))
# How far a run goes. They may change from one invocation to the next, also of a finished run.
LIMITS = (*PER_INVOCATION, ("trainer", "epochs"), ("trainer", "max_steps"))
# How a run is watched, and how often it is saved: no bit of its result.
WATCHED = (
    *(("trainer", "hang_timeout"), ("trainer", "log_every")),
    *(("trainer", "stop_on_nan"), ("trainer", "detect_anomaly")),
    *(("checkpoint", "every_steps"), ("checkpoint", "every_epochs"), ("checkpoint", "at_end")),
    ("checkpoint", "project", "total_limit"),
)
# Where a run is computed and told: nothing of what it computes.
ELSEWHERE = (
    *WATCHED,
    *(("name",), ("output_dir",), ("tags",), ("distributed",), ("tracker",), ("profile",)),
    ("submit",),
    *(("dataloader", "num_workers"), ("dataloader", "pin_memory")),
    *(("dataloader", "prefetch_factor"), ("dataloader", "persistent_workers")),
)
# What changes nothing of what a run computes: of which session, where, and with which folders.
NO_CHANGE = (*PER_INVOCATION, *ELSEWHERE, ("checkpoint", "project"))
# What makes no other run of it for `resume=auto`: that, and how far it goes.
SAME_RUN = (*LIMITS, *ELSEWHERE)


@dataclass(frozen=True)
class Refused:
    """Why a key cannot change when a run is resumed; ``{before}`` is the value that the run has."""

    rule: str
    remedy: str


NEW_RUN = "Leave it out, or start a new run."
_PLACE = Refused("the run stays where it is ({key}={before})", "Leave {key} out.")
_ORDER = Refused(
    "the order of the data and every random draw of a run follow from it ({key}={before})", NEW_RUN
)
_STATE = Refused("the checkpoint holds the state of {before}, which fits nothing else", NEW_RUN)
# What cannot change; any other override holds from the next optimizer step on. A schedule then is
# as if it had held from the first step; whether a model or data fits is found as they are loaded.
REFUSED: dict[str, Refused] = {
    **dict.fromkeys(("name", "output_dir"), _PLACE),
    "run_dir": Refused("the run stays where it is", "Leave run_dir out."),
    **dict.fromkeys(("seed", "dataloader.use_seedable_sampler", "dataloader.data_seed"), _ORDER),
    "precision.scaler.init_scale": Refused(
        "the gradient scale goes on from the checkpoint",
        "Leave it out; growth_factor, backoff_factor and growth_interval may change.",
    ),
    **dict.fromkeys(("step.name", "step._target_", "optimizer.name", "optimizer._target_"), _STATE),
    "checkpoint.project.project_dir": Refused(
        "the run's checkpoints lie where they are ({before})", "Leave it out."
    ),
}


def refusals(frozen: Mapping[str, object], changed: Mapping[str, object]) -> list[Problem]:
    """Return the problems of what a resumed run changes in its recipe and cannot."""
    problems = Problems()
    changes = differences(frozen, changed)
    # A scaler that the run has not had begins as the recipe says.
    fresh = "precision.scaler." if any(key == "precision.mode" for key, *_ in changes) else None
    for key, before, after in changes:
        found = REFUSED.get(key)
        if found is not None and not (fresh and key.startswith(fresh)):
            rule, remedy = (
                text.format(key=key, before=before) for text in (found.rule, found.remedy)
            )
            problems.add(f"{key}={after} with resume", rule, remedy)
    return problems


def absolute(path: str | None, cwd: str | os.PathLike[str]) -> str | None:
    """Return the absolute path of a folder that a recipe names, seen from `cwd`; None stays."""
    return None if path is None else os.path.abspath(os.path.join(cwd, os.path.expanduser(path)))


def same_places(there: object, cwd: str, here: object) -> Any:
    """Return `here` with each folder that is the same one as in `there` written as there.

    Relative folders of `there` are seen from `cwd`, those of `here` from the working directory.
    """
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        result = dict(here)
        for key in ("output_dir", "project_dir", "logging_dir", "checkpoint", "project"):
            if key in there and key in here:
                result[key] = same_places(there[key], cwd, here[key])
        return result
    if not isinstance(there, str) or not isinstance(here, str):
        return here
    return there if absolute(there, cwd) == absolute(here, os.getcwd()) else here


def without_limits(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe as plain containers with the keys of one invocation set to null."""
    result = dict(recipe)
    for *parents, key in PER_INVOCATION:
        node = result
        for parent in parents:
            node[parent] = dict(node[parent])
            node = node[parent]
        node[key] = None
    return result


def differences(
    there: object, here: object, but_for: Sequence[tuple[str, ...]] = (), key: tuple[str, ...] = ()
) -> list[tuple[str, object, object]]:
    """Return (dotted key, value there, value here) of what two recipes do not have in common.

    They are plain containers, or the parts of recipes at `key`. Keys of `but_for`, and everything
    below them, do not count.
    """
    if there == here or key in but_for:
        return []
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return [(".".join(key), there, here)]
    found = []
    for name in [*there, *(name for name in here if name not in there)]:
        found += differences(there.get(name), here.get(name), but_for, (*key, str(name)))
    return found
