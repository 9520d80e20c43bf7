"""From a command line to the recipe of a new or a resumed run. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from accel.machine.errors import ConfigError, Problem
from runner.recipe import diagnose, hydra_setup, keys, resumed_recipe, serialization
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
    found that run. `notes` are lines for people about what won over what.
    """

    recipe: Recipe
    problems: list[Problem]
    overrides: tuple[str, ...]
    config_name: str
    composed: bool = True
    origin: str | None = None
    auto: bool = False
    log_levels: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def new_run(overrides: Sequence[str], config_name: str, number: int = 0) -> Examined:
    """Compose a recipe from `conf/` and overrides without sweeps, inside a session.

    `number` is the index of the job in a sweep.
    """
    config, problems, notes = diagnose.examine(overrides, config_name, number)
    try:
        found, wrong = serialization.examine(hydra_setup.plain(config))
    except OmegaConfBaseException as error:
        problems.append(unresolved(error))
        return Examined(Recipe(), problems, tuple(overrides), config_name, composed=False)
    told = [diagnose.placed(one) if one.rule == keys.UNKNOWN else one for one in wrong]
    wrong = [*problems, *told]
    composed = len(config) > 0
    levels = hydra_setup.log_levels(overrides) if composed and not wrong else {}
    return Examined(
        found,
        wrong,
        tuple(overrides),
        config_name,
        composed=composed,
        log_levels=levels,
        notes=tuple(notes),
    )


def unresolved(error: OmegaConfBaseException) -> Problem:
    """Return the problem with an interpolation that leads nowhere, or a value that is missing."""
    key = str(getattr(error, "full_key", None) or "the recipe")
    rule = str(getattr(error, "msg", None) or error).splitlines()[0]
    where = diagnose.file_with(key, r".*\$\{")
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
    searched = [o for o in own if hydra_setup.key_of(o) == hydra_setup.SEARCHED]
    folders = hydra_setup.session([*searched, *overrides]) if searched else nullcontext()
    merged = tuple(hydra_setup.merge(own, overrides))
    with folders:
        words = diagnose.sorted_words(overrides)
        problems = words.problems
        try:
            changed = run.plain
            if words.choices:
                changed, wrong = _with_choices(run, own, words.choices)
                problems += wrong
            config, wrong = diagnose.applied(words.values, changed)
            changed = hydra_setup.plain(config)
        except OmegaConfBaseException as error:
            problems.append(unresolved(error))
            return Examined(Recipe(), problems, merged, run.config_name, composed=False)
    found, invalid = serialization.examine(resumed_recipe.same_places(run.plain, run.cwd, changed))
    kept: list[Problem] = []
    if trains and not invalid:
        kept = resumed_recipe.refusals(run.plain, serialization.to_plain(found))
    return Examined(found, [*problems, *wrong, *invalid, *kept], merged, run.config_name)


def _with_choices(
    run: Frozen, own: Sequence[str], choices: Sequence[str]
) -> tuple[dict[str, object], list[Problem]]:
    """Return a frozen recipe with what newly chosen files change, and the problems of those.

    That is the difference of two compositions of today, from the files that the run has chosen and
    from those and the new ones. Where one of the run's is gone, it is that to the default files.
    """
    chosen = diagnose.sorted_words(own).choices
    before, lost, _ = diagnose.examine(chosen, run.config_name)
    if lost:
        chosen = []
        before, _, _ = diagnose.examine(chosen, hydra_setup.PRIMARY)
    name = hydra_setup.PRIMARY if lost else run.config_name
    after, problems, _ = diagnose.examine(hydra_setup.merge(chosen, choices), name)
    if not after:
        return run.plain, problems
    _hold_recorded(before, after, run.plain)
    today = hydra_setup.plain(after)
    changed = resumed_recipe.carry_over(run.plain, hydra_setup.plain(before), today)
    keys_of_choices = {hydra_setup.key_of(choice) for choice in choices}
    return dict(resumed_recipe.imposed(changed, today, keys_of_choices)), problems


def _hold_recorded(before: DictConfig, after: DictConfig, recorded: Mapping[str, object]) -> None:
    """Give values that cannot be resolved any more their recorded ones.

    A variable of the environment may be gone. What the new files set themselves must resolve.
    """
    own, new, known = map(_leaves, (before, after, OmegaConf.create(dict(recorded))))
    for key, text in own.items():
        if "${" not in str(text) or new.get(key) != text or key not in known:
            continue
        for config in (before, after):
            try:
                found = OmegaConf.select(config, key)
                if OmegaConf.is_config(found):
                    OmegaConf.to_container(found, resolve=True)
            except OmegaConfBaseException:
                OmegaConf.update(config, key, known[key], force_add=True)


def _leaves(config: DictConfig) -> dict[str, object]:
    """Return values and lists by dotted key, not resolved."""
    found: dict[str, object] = {}

    def walk(node: object, prefix: str) -> None:
        for name, value in node.items() if isinstance(node, dict) else ():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = value

    walk(OmegaConf.to_container(config, resolve=False), "")
    return found


def to_yaml(found: Recipe) -> str:
    """Return a recipe as YAML: every key with its value."""
    return OmegaConf.to_yaml(OmegaConf.create(serialization.to_plain(found)))


def require(examined: Examined) -> Recipe:
    """Return the recipe, or raise a ConfigError of everything that is wrong with it."""
    ConfigError.raise_if(examined.problems)
    return examined.recipe
