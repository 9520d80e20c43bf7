"""From a command line to the recipe of a new or a resumed run. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from accel.machine.errors import ConfigError, Problem
from runner.recipe import diagnose, facts, hydra_setup, keys, serialization
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
    origin: str | None = None


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
    origin: str | None = None
    auto: bool = False
    log_levels: Mapping[str, str] = field(default_factory=dict)


def new_run(overrides: Sequence[str], config_name: str, number: int = 0) -> Examined:
    """Compose a recipe from `conf/` and overrides without sweeps, inside a session.

    `number` is the index of the job in a sweep.
    """
    given = tuple(overrides)
    config, problems = diagnose.examine(overrides, config_name, number)
    try:
        found, wrong = serialization.examine(hydra_setup.plain(config))
    except OmegaConfBaseException as error:
        problems.append(diagnose.placed(unresolved(error), overrides, config_name))
        return Examined(Recipe(), problems, given, config_name, composed=False)
    for one in wrong:
        unknown = one.rule == keys.UNKNOWN
        problems.append(diagnose.placed(one, overrides, config_name) if unknown else one)
    levels = hydra_setup.log_levels(overrides) if config and not problems else {}
    composed = len(config) > 0
    return Examined(found, problems, given, config_name, composed=composed, log_levels=levels)


def unresolved(error: OmegaConfBaseException) -> Problem:
    """Return the problem with an interpolation that leads nowhere, or a value that is missing."""
    key = str(getattr(error, "full_key", None) or "the recipe")
    rule = str(getattr(error, "msg", None) or error).splitlines()[0]
    if facts.is_late(rule):
        rule = serialization.NOT_LATE
    return Problem(key, rule, "Give it a value.")


def resumed(run: Frozen, overrides: Sequence[str] = (), *, trains: bool = True) -> Examined:
    """Return the recipe with which a run is resumed: its frozen one, with the new overrides.

    Later changes of files in `conf/` are ignored: only nodes whose files the new overrides choose
    are taken from them. Call it inside a session. Overrides come without `resume`; where the run
    `trains` further, some keys must not change.
    """
    limits = {".".join(path) for path in serialization.PER_INVOCATION}
    own = tuple(o for o in run.overrides if hydra_setup.key_of(o) not in limits)
    plain = serialization.without_limits(run.plain)
    return _changed(replace(run, plain=plain), own, overrides, trains)


def again(run: Frozen, overrides: Sequence[str] = ()) -> Examined:
    """Return the recipe of a new run that does as `run` describes, limits included.

    As `resumed`, but any key may change. Call it inside a session.
    """
    return replace(_changed(run, run.overrides, overrides, trains=False), origin=None)


def _changed(run: Frozen, own: Sequence[str], overrides: Sequence[str], trains: bool) -> Examined:
    """Return a frozen recipe, composed from a run's `own` overrides, with new ones."""
    if not overrides:
        found, problems = serialization.examine(run.plain)
        return Examined(found, problems, run.overrides, run.config_name, origin=run.origin)
    searched = [o for o in own if hydra_setup.key_of(o) == hydra_setup.SEARCHED]
    merged = tuple(hydra_setup.merge(own, overrides))
    with hydra_setup.session([*searched, *overrides]) if searched else nullcontext():
        words = diagnose.sorted_words(overrides)
        problems = words.problems
        config = OmegaConf.merge(serialization.typed(), run.plain)
        assert isinstance(config, DictConfig)
        try:
            problems += _choose(run, own, words.choices, config)
            problems += diagnose.apply(words.values, config)
            changed = hydra_setup.plain(config)
        except OmegaConfBaseException as error:
            problems.append(unresolved(error))
            return Examined(Recipe(), problems, merged, run.config_name, composed=False)
        levels = {} if problems else hydra_setup.log_levels(overrides)
    found, invalid = serialization.examine(serialization.same_places(run.plain, run.cwd, changed))
    problems += invalid
    if trains and not invalid:
        problems += serialization.refusals(run.plain, serialization.to_plain(found))
    return Examined(found, problems, merged, run.config_name, origin=run.origin, log_levels=levels)


def _choose(
    run: Frozen, own: Sequence[str], choices: Sequence[str], config: DictConfig
) -> list[Problem]:
    """Put the nodes of newly chosen files into a frozen recipe, and return what is wrong with them.

    Those are the nodes of the groups, and others that differ between two compositions of today:
    from the files that the run has chosen, and from those and the new ones. Where one of the run's
    is gone, it has the default files.
    """
    problems, new = [], []
    for choice in choices:
        if hydra_setup.key_of(choice) in config or choice.startswith("hydra"):
            new.append(choice)
        elif choice not in own:
            rule = "it may set any key, and the recipe of the run is recorded"
            problems.append(Problem(choice, rule, "Give the keys that are to change."))
    if not new:
        return problems
    there, name = diagnose.sorted_words(own).choices, run.config_name
    before, lost = diagnose.examine(there, name)
    if lost:
        there, name = [], hydra_setup.PRIMARY
        before, _ = diagnose.examine(there, name)
    after, wrong = diagnose.examine(hydra_setup.merge(there, new), name)
    here: Any = OmegaConf.to_container(after, resolve=False)
    usual: Any = OmegaConf.to_container(before, resolve=False)
    named = set(map(hydra_setup.key_of, new))
    for node in here:
        if node in named or here[node] != usual[node]:
            config[node] = after[node]
    return [*problems, *wrong]


def require(examined: Examined) -> Recipe:
    """Return the recipe, or raise a ConfigError of everything that is wrong with it."""
    ConfigError.raise_if(examined.problems)
    return examined.recipe
