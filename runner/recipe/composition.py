"""From a command line to the recipe of a new or a resumed run. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from accel.machine.errors import ConfigError, Problem
from runner.recipe import conf_files, diagnose, hydra_setup, resumed_recipe, serialization
from runner.recipe.schema import Recipe


@dataclass(frozen=True)
class Frozen:
    """The recorded recipe of a run, and the command that it was composed from.

    `plain` is the recipe in plain containers, `cwd` the folder of the command, `origin` the
    fingerprint of the files that this was read from.
    """

    plain: dict[str, object]
    overrides: tuple[str, ...] = ()
    config_name: str = hydra_setup.PRIMARY
    cwd: str = "."
    origin: bytes | None = None


@dataclass(frozen=True)
class Examined:
    """A recipe, as far as it could be built: with defaults for the nodes that have problems.

    Where composing failed, `composed` is False, and there is nothing to check further. `origin` is
    the `directory.fingerprint` of a run to resume, None for a new one; `auto`: `resume=auto` has
    found that run.
    """

    recipe: Recipe
    problems: list[Problem]
    overrides: tuple[str, ...]
    config_name: str
    composed: bool = True
    origin: bytes | None = None
    auto: bool = False
    log_levels: Mapping[str, str] = field(default_factory=dict)


def new_run(overrides: Sequence[str], config_name: str, number: int = 0) -> Examined:
    """Compose a recipe from `conf/` and overrides without sweeps, inside a session.

    `number` is the index of the job in a sweep.
    """
    config, problems = diagnose.examine(overrides, config_name, number)
    try:
        found, wrong = serialization.examine(hydra_setup.plain(config))
    except OmegaConfBaseException as error:
        problems.append(unresolved(error))
        return Examined(Recipe(), problems, tuple(overrides), config_name, composed=False)
    wrong = [*problems, *wrong]
    composed = len(config) > 0
    levels = hydra_setup.log_levels(overrides) if composed and not wrong else {}
    given = tuple(overrides)
    return Examined(found, wrong, given, config_name, composed=composed, log_levels=levels)


def unresolved(error: OmegaConfBaseException) -> Problem:
    """Return the problem with an interpolation that leads nowhere, or a value that is missing."""
    key = str(getattr(error, "full_key", None) or "the recipe")
    rule = str(getattr(error, "msg", None) or error).splitlines()[0]
    named = re.search(r"'([^']+)'", rule)
    # Which file the interpolation stands in, where the command line has none of it.
    where = conf_files.containing(rf"\$\{{[^}}]*{re.escape(named.group(1))}") if named else ""
    return Problem(f"{where}{key}", rule, "Give it a value.")


def resumed(run: Frozen, overrides: Sequence[str] = (), *, trains: bool = True) -> Examined:
    """Return the recipe with which a run is resumed: its frozen one, with the new overrides.

    Later changes of files in `conf/` are ignored: only values that the new overrides change are
    taken from them. Call it inside a session. Overrides come without `resume`; where the run
    `trains` further, some keys must not change.
    """
    limits = {".".join(path) for path in resumed_recipe.PER_INVOCATION}
    own = tuple(o for o in run.overrides if hydra_setup.key_of(o) not in limits)
    kept = replace(run, plain=resumed_recipe.without_limits(run.plain))
    found = replace(_changed(kept, own, overrides, trains), origin=run.origin)
    return found if found.problems else replace(found, log_levels=hydra_setup.log_levels(overrides))


def again(run: Frozen, overrides: Sequence[str] = ()) -> Examined:
    """Return the recipe of a new run that does as `run` describes, limits included.

    As `resumed`, but any key may change. Call it inside a session.
    """
    found = _changed(run, run.overrides, overrides, trains=False)
    return found if found.problems else replace(found, log_levels=hydra_setup.log_levels(overrides))


def _changed(run: Frozen, own: Sequence[str], overrides: Sequence[str], trains: bool) -> Examined:
    """Return a frozen recipe, composed from a run's `own` overrides, with new ones."""
    if not overrides:
        found, problems = serialization.examine(run.plain)
        return Examined(found, problems, run.overrides, run.config_name)
    if any(hydra_setup.key_of(override) == hydra_setup.SEARCHED for override in own):
        # Of the folders that the run was composed from, and of those that are new to it.
        with hydra_setup.session([*own, *overrides]):
            return _recomposed(run, own, overrides, trains)
    return _recomposed(run, own, overrides, trains)


def _recomposed(
    run: Frozen, own: Sequence[str], overrides: Sequence[str], trains: bool
) -> Examined:
    merged = hydra_setup.merge(own, overrides)
    before, lost = diagnose.examine(own, run.config_name)
    if lost:  # a file that the run was composed from is missing: its frozen recipe is the base
        return _applied_to_frozen(run, overrides, trains)
    after, problems = diagnose.examine(merged, run.config_name)
    try:
        changed = _with_changes(run.plain, before, after, overrides)
    except OmegaConfBaseException as error:
        problems.append(unresolved(error))
        return Examined(Recipe(), problems, tuple(merged), run.config_name, composed=False)
    return _examine_changed(run, changed, problems, merged, trains)


def _applied_to_frozen(run: Frozen, overrides: Sequence[str], trains: bool) -> Examined:
    """Return a run's recorded recipe with new overrides: groups from today's files, then values."""
    merged = hydra_setup.merge(run.overrides, overrides)
    groups = hydra_setup.groups()
    choices = [o for o in overrides if hydra_setup.key_of(o) in groups]
    values = [o for o in overrides if o not in choices]
    changed: Mapping[str, object] = run.plain
    problems: list[Problem] = []
    try:
        if choices:
            after, problems = diagnose.examine(choices, hydra_setup.PRIMARY)
            before, _ = diagnose.examine([], hydra_setup.PRIMARY)
            changed = _with_changes(run.plain, before, after, choices)
        config, wrong = diagnose.applied(values, changed)
        changed = hydra_setup.plain(config)
    except OmegaConfBaseException as error:
        problems.append(unresolved(error))
        return Examined(Recipe(), problems, tuple(merged), run.config_name, composed=False)
    return _examine_changed(run, changed, [*problems, *wrong], merged, trains)


def _with_changes(
    frozen: dict[str, object], before: DictConfig, after: DictConfig, overrides: Sequence[str]
) -> Mapping[str, object]:
    today = hydra_setup.plain(after)
    changed = resumed_recipe.carry_over(frozen, hydra_setup.plain(before), today)
    return resumed_recipe.imposed(changed, today, {hydra_setup.key_of(o) for o in overrides})


def _examine_changed(
    run: Frozen,
    changed: Mapping[str, object],
    problems: Sequence[Problem],
    merged: Sequence[str],
    trains: bool,
) -> Examined:
    """Return the recipe that a run is resumed with, and its problems and forbidden changes."""
    found, wrong = serialization.examine(resumed_recipe.same_places(run.plain, run.cwd, changed))
    kept = (
        resumed_recipe.refusals(run.plain, serialization.to_plain(found))
        if trains and not wrong
        else []
    )
    return Examined(found, [*problems, *wrong, *kept], tuple(merged), run.config_name)


def to_yaml(found: Recipe) -> str:
    """Return a recipe as YAML: every key with its value."""
    return OmegaConf.to_yaml(OmegaConf.create(serialization.to_plain(found)))


def require(examined: Examined) -> Recipe:
    """Return the recipe, or raise a ConfigError of everything that is wrong with it."""
    ConfigError.raise_if(examined.problems)
    return examined.recipe
