"""Composing a recipe from words, and every mistake in them with its remedy. Free of torch.

Hydra stops at the first mistake and speaks of it in its own terms. So Hydra composes the chosen
files alone; values are set here, one by one, and each mistake is reported beside the others.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from accel.machine.errors import ConfigError, Problem, closest, did_you_mean, listed, nearest
from runner.recipe import foreign_names, hydra_setup, keys, paths
from runner.recipe.schema import PLUGINS, Recipe

# What composing raises for a mistake of the user's; OmegaConf stumbles over null nodes.
MISTAKES = (
    *(HydraException, OmegaConfBaseException, YAMLError),
    *(AssertionError, AttributeError, ValueError, OSError, RecursionError),
)
NODE = "it is a node with keys of its own"


@dataclasses.dataclass
class Words:
    """The words of a command line, sorted: choices of files, values, and mistakes."""

    choices: list[str]
    values: list[Override]
    problems: list[Problem]


def sorted_words(overrides: Sequence[str]) -> Words:
    """Sort overrides without sweeps; of several of one key the last is taken."""
    overrides, problems = keys.pairs(overrides)
    found = Words([], [], problems)
    for override in unique(overrides):
        wrong = hydra_setup.hydra_problems([override])
        if wrong:
            found.problems += wrong
            continue
        try:
            parsed = hydra_setup.parse([override])[0]
        except HydraException as failure:
            found.problems.append(_unreadable(override, failure))
            continue
        mapping = not parsed.is_delete() and isinstance(parsed.value(), dict)
        group = parsed.key_or_group in hydra_setup.groups() and not mapping
        problem = _sweep_problem(parsed, override)
        if group and problem is None:
            problem = _choice_problem(parsed, override)
        if problem is not None:
            found.problems.append(problem)
        elif group or hydra_setup.key_of(override).startswith("hydra"):
            found.choices.append(override)
        else:
            found.values.append(parsed)
    return found


def examine(
    overrides: Sequence[str], config_name: str, number: int = 0
) -> tuple[DictConfig, list[Problem], list[str]]:
    """Compose as much of a recipe as can be.

    Returns:
        The recipe, empty where its files do not compose; what is wrong; lines about values that a
        file has replaced.
    """
    words = sorted_words(overrides)
    try:
        config = hydra_setup.compose(words.choices, config_name, number, overrides)
    except ConfigError as error:
        return OmegaConf.create(), [*words.problems, *error.problems], []
    except MISTAKES as error:
        return OmegaConf.create(), [*words.problems, *translate(error, config_name)], []
    notes = hydra_setup.won_over_choices(words.choices, config)
    return config, [*words.problems, *apply(words.values, config)], notes


def applied(
    values: Sequence[Override], plain: Mapping[str, object]
) -> tuple[DictConfig, list[Problem]]:
    """Set values in a recorded recipe, inside a session; return it, and what cannot be set."""
    config = OmegaConf.merge(hydra_setup.schema(), plain)
    assert isinstance(config, DictConfig)
    return config, apply(values, config)


def unique(overrides: Sequence[str]) -> list[str]:
    """Return the last override of each key; where that takes out the key, with the one before."""
    last: dict[str, list[str]] = {}
    for override in overrides:
        key = hydra_setup.key_of(override)
        kept = last.get(key, [])[:1] if hydra_setup.takes_out(override) else []
        last[key] = [*(one for one in kept if one != override), override]
    return [override for found in last.values() for override in found]


def overridden(overrides: Sequence[str]) -> list[str]:
    """Return a line for each override that a later one of the same key overrides."""
    last = {hydra_setup.key_of(override): override for override in overrides}
    return [
        f"{override} is overridden by {last[key]}: the last one of a key is taken"
        for override in overrides
        if last[key := hydra_setup.key_of(override)] is not override
    ]


def unreadable(overrides: Sequence[str]) -> list[Problem]:
    """Return a problem for each override of a sweep that Hydra's grammar does not read."""
    overrides, problems = keys.pairs(overrides)
    for override in overrides:
        try:
            hydra_setup.parse([override])
        except HydraException as failure:
            problems.append(_unreadable(override, failure))
    return problems


def options_of(group: str) -> list[str]:
    """Return the names of the files of a group; "" stands for the primary files."""
    loader = GlobalHydra.instance().config_loader()
    return list(loader.get_group_options(group, ObjectType.CONFIG))


def _unreadable(override: str, failure: HydraException) -> Problem:
    if "=" not in override:
        known = [*keys.COMMANDS, *(f"{group}=" for group in hydra_setup.groups())]
        key = keys.key_for(override)
        if key is not None:
            return Problem(override, "a value is given as key=value", f"Write {key}=…")
        return Problem(override, "it is neither a command nor key=value", nearest(override, known))
    return Problem(
        override,
        f"it cannot be read: {str(failure).splitlines()[0]}",
        "Quote values with special characters: \"key='a, b'\". A list is [a,b], a mapping {a: 1}.",
    )


def _choice_problem(parsed: Override, override: str) -> Problem | None:
    group, known = parsed.key_or_group, options_of(parsed.key_or_group)
    if parsed.package is not None:
        return Problem(override, f"{group} has one place in a recipe", f"Write {group}=…")
    value = None if parsed.is_delete() else parsed.value()
    for option in value if isinstance(value, list) else [] if value is None else [value]:
        meant = foreign_names.option(group, option)
        if meant is not None and option not in known:
            rule = f"{group} is one of {', '.join(known)}"
            return Problem(f"{group}={option}", rule, did_you_mean(meant))
        if not isinstance(option, str):
            rule = f"{group}= takes the name of a file of conf/{group}"
            remedy = f"Choose one of {', '.join(known)}; set single values with {group}.key=…"
            return Problem(override, rule, remedy)
        if option not in known:
            rule = f"{group} is one of {', '.join(known)}"
            return Problem(f"{group}={option}", rule, _elsewhere(option) or nearest(option, known))
    if (parsed.is_add() or parsed.is_force_add()) and _has_place(group):
        rule = f"{group} has a place in every recipe"
        return Problem(override, rule, f"Leave out the +: {override.lstrip('+')}")
    return None


def _elsewhere(option: str) -> str | None:
    """Return the remedy for the file of a strategy that was chosen for another one, or None."""
    found = [name for name in PLUGINS if option in options_of(name)]
    return f"Did you mean {found[0]}={option}?" if found and option != "default" else None


def _has_place(group: str) -> bool:
    """Return whether the primary file chooses a file of a group, if only none."""
    return group in PLUGINS or (paths.conf_folder() / group).is_dir()


def _sweep_problem(parsed: Override, override: str) -> Problem | None:
    if not parsed.is_sweep_override():
        return None
    return Problem(
        override,
        "several values make several jobs",
        "Add -m to sweep over them; write a list as key=[a,b].",
    )


def apply(values: Sequence[Override], config: DictConfig) -> list[Problem]:
    """Set values in a recipe, and return what is wrong with those that cannot be set.

    What names a factory goes first: the arguments that the node has belong to the one before.
    """
    naming = [parsed for parsed in values if _factory_node(parsed) is not None]
    others = [parsed for parsed in values if parsed not in naming]
    return [problem for parsed in [*naming, *others] for problem in _apply(parsed, config)]


def _factory_node(parsed: Override) -> str | None:
    """Return the node whose factory an override names, by ``model.name=x`` or ``model={name: x}``.

    None: it names none.
    """
    key, value = parsed.key_or_group, None if parsed.is_delete() else parsed.value()
    node, _, leaf = key.rpartition(".")
    if keys.names_factory(node) and leaf in ("name", "_target_"):
        return node
    named = isinstance(value, dict) and any(hydra_setup.factory_named(_by_text(value)))
    return key if keys.names_factory(key) and named else None


def _by_text(value: Mapping[Any, object]) -> dict[str, object]:
    return {str(key): item for key, item in value.items()}


def _apply(parsed: Override, config: DictConfig) -> list[Problem]:
    """Set one value, or return why not."""
    key, line = parsed.key_or_group, str(parsed.input_line)
    content: Any = OmegaConf.to_container(config, resolve=False)
    whole = not parsed.is_delete() and isinstance(parsed.value(), dict)
    off = keys.switched_off(f"{key}.*" if whole else key, content)
    free = keys.is_free(key)
    if off is not None and keys.node_of(off) is not None:
        return [_switched_off(off, line)]
    known = keys.known_keys(content)
    if parsed.is_add() and key in known and not free and not whole:
        return [Problem(line, "there is such a key already", f"Leave out the +: {line[1:]}")]
    if not free and key not in known:
        return [keys.unknown_key(key, known, f"={line.partition('=')[2]}")]
    if parsed.is_delete():
        return _take_out(key, line, known, config)
    node = _factory_node(parsed)
    if node is not None:
        _rename(node, parsed, config)
    if keys.is_switch(key) and type(parsed.value()) is int and parsed.value() not in (0, 1):
        return [Problem(line, _rule_of(key), "Correct the value.")]  # OmegaConf takes it for true
    try:
        OmegaConf.update(config, key, parsed.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, AssertionError, TypeError) as failure:
        return [_bad_value(key, line, failure)]
    return []


def _rename(node: str, parsed: Override, config: DictConfig) -> None:
    """Empty a node whose factory is not the one that an override names."""
    value: Any = parsed.value()
    leaf = parsed.key_or_group.rpartition(".")[2]
    given = {leaf: value} if node != parsed.key_or_group else _by_text(value)
    now = OmegaConf.select(config, node)
    if hydra_setup.factory_named(now) != hydra_setup.factory_named(given):
        OmegaConf.update(config, node, {}, merge=False, force_add=True)


def _take_out(key: str, line: str, known: Sequence[str], config: DictConfig) -> list[Problem]:
    """Take an argument of a factory or another free key out, or return why not."""
    if not keys.is_free(key):
        return [Problem(line, "every key of a recipe has a value", f"Give {key}=… another one.")]
    parent, _, leaf = key.rpartition(".")
    if key not in known:
        names = [name.rpartition(".")[2] for name in known if name.startswith(f"{parent}.")]
        close = closest(leaf, names)
        remedy = f"Did you mean '~{parent}.{close}'?" if close else "Leave it out."
        return [Problem(line, "there is no such key to take out", remedy)]
    OmegaConf.set_struct(config, False)
    del OmegaConf.select(config, parent)[leaf]
    return []


def _switched_off(node: str, line: str) -> Problem:
    if node in hydra_setup.groups():
        known = [f"{node}={option}" for option in options_of(node)]
        return Problem(line, f"{node} is off", f"Switch it on with {' or '.join(known)}.")
    head, _, leaf = node.rpartition(".")
    return Problem(line, f"{node} is off", f"Switch it on with {head}={leaf}.")


def _bad_value(key: str, line: str, failure: Exception) -> Problem:
    reason = str(getattr(failure, "msg", None) or failure).splitlines()[0]
    return Problem(line, _rule_of(key) or reason, "Correct the value.")


TYPES: dict[object, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "text"},
    **{list[str]: "a list of texts", type(None): "null"},
}


def _rule_of(key: str) -> str:
    """Return the type of a key of the schema in the words of a person who writes YAML, or ""."""
    if keys.node_of(key) is not None:
        return NODE
    hint = keys.hint_of(key)
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = [TYPES.get(part, "") for part in parts]
    return f"it is {' or '.join(words)}" if all(words) else ""


def translate(error: Exception, config_name: str) -> list[Problem]:
    """Return what a file of `conf/` has wrong, from what composing it raised."""
    text = " ".join(str(error).split())
    found: BaseException = error
    while isinstance(found, ConfigCompositionException) and (found.__cause__ or found.__context__):
        found = found.__cause__ or found.__context__ or found
    key = str(getattr(found, "full_key", None) or "")
    if isinstance(error, RecursionError):
        found_in = [name for path, name in hydra_setup.own_files() if "defaults" in _text(path)]
        rule = "a defaults list leads back to its own file"
        return [Problem(listed(found_in) or "conf", rule, "Take that entry out of the list.")]
    if isinstance(error, UnicodeDecodeError):
        return [Problem(_undecodable(), f"it is not UTF-8 text ({error})", "Save it as UTF-8.")]
    if isinstance(error, MissingConfigException):
        return [_missing_file(str(error.missing_cfg_file), _place(error), config_name)]
    if not text:  # Hydra's grammar says nothing of an interpolation that is not closed
        where = _containing(r"(?m)\$\{[^}\n]*$")
        rule = "an interpolation is not closed" if where else "it cannot be composed"
        return [Problem(where or "conf", rule, "Write ${key}, both braces.")]
    if isinstance(error, YAMLError):
        remedy = "Indent with spaces, not tabs." if "'\\t'" in text else "Correct the file."
        return [Problem("conf", f"a file is no YAML: {text}", remedy)]
    place = _place(error)
    if key and key not in keys.typed_keys() and not keys.is_free(key):
        wrong = keys.unknown_key(key, list(keys.typed_keys()))
        return [dataclasses.replace(wrong, value=f"{place}{key}")]
    # Of a node that is given as text, OmegaConf tells the class alone.
    kind = re.search(r"is not a subclass of (\w+)\. value: (.*)", str(error))
    named = [name for name, node in keys.nodes(Recipe).items() if kind and node is not None]
    if kind and not key:
        key = next((name for name in named if _class_of(name) == kind[1]), "")
    if key and _rule_of(key):
        chosen = f"Choose a file by `- override /{key}: …` in the defaults list, or write "
        remedy = f"{chosen}its keys below it." if key in named else "Correct the file."
        return [Problem(f"{place}{key}{f': {kind[2]}' if kind else ''}", _rule_of(key), remedy)]
    twice = re.match(r"Multiple values for (\S+)\.", text)
    if twice:
        place = _containing(rf"(?m)^\s*-\s*/{re.escape(twice[1])}\s*:")
    reason = str(getattr(found, "msg", None) or re.sub(r"^In '[^']+': ", "", text))
    value = f"{place}{key}".rstrip(": ") or "conf"
    return [Problem(value, reason.splitlines()[0].rstrip("."), "Correct the file.")]


def _class_of(node: str) -> str:
    kind = keys.node_of(node)
    return "" if kind is None else kind.__name__


def _missing_file(name: str, place: str, config_name: str) -> Problem:
    group, _, option = name.rpartition("/")
    if not group and option == config_name:
        rule = "there is no such file in any conf folder"
        remedy = nearest(config_name, options_of(""))
        return Problem(f"--config-name {config_name}", rule, remedy)
    value = f"{group}={option}" if group.startswith("hydra/") else f"{place}{group}: {option}"
    remedy = nearest(option, options_of(group))
    found = Problem(value, "there is no such file", remedy)
    return foreign_names.plugin(group, option) or found


def _place(error: Exception) -> str:
    """Return the file that an error of Hydra's is about, as a prefix."""
    found = re.match(r"In '([^']+)'", str(error))
    return f"conf/{found.group(1)}.yaml: " if found else ""


def placed(problem: Problem) -> Problem:
    """Return the problem of an unknown key with the file of the user's that has it."""
    key = problem.value.partition("=")[0]
    where = file_with(key)
    head, _, rest = key.partition(".")
    remedy = problem.remedy
    if where and rest and head in hydra_setup.groups() and head not in keys.nodes(Recipe):
        remedy = "Write `# @package _global_` as the first line of the file."
    return Problem(f"{where}{problem.value}", problem.rule, remedy)


def file_with(key: str, value: str = "") -> str:
    """Return the first file of the user's that sets the last part of a key, as a prefix, or "".

    `value` is a pattern of what is set.
    """
    leaf = re.escape(key.rpartition(".")[2])
    found = _containing(rf"(?m)(^|[{{,])\s*{leaf}\s*:{value}")
    return f"{found}: " if found else ""


def _containing(pattern: str) -> str:
    """Return the first file of the user's that contains a pattern, or ""."""
    found = (name for path, name in hydra_setup.own_files() if re.search(pattern, _text(path)))
    return next(found, "")


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace")


def _undecodable() -> str:
    for path, name in hydra_setup.own_files():
        try:
            path.read_text("utf-8")
        except UnicodeDecodeError:
            return name
    return "conf"
