"""Why a recipe does not compose: every mistake, each with its remedy. Free of torch.

Hydra stops at the first mistake and speaks of it in its own terms. Once composing has failed, the
overrides are therefore looked at one by one, and what is left is composed and checked as well.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from accel.machine.errors import ConfigError, Problem, closest, did_you_mean, nearest
from runner.recipe import conf_files, foreign_names, hydra_setup, keys, override_mistakes, paths
from runner.recipe.schema import PLUGINS, Recipe

# What composing raises for a mistake of the user's; OmegaConf stumbles over null nodes.
MISTAKES = (
    *(HydraException, OmegaConfBaseException, YAMLError),
    *(AssertionError, AttributeError, ValueError, OSError, RecursionError),
)
NODE = "it is a node with keys of its own"


def examine(
    overrides: Sequence[str], config_name: str, number: int = 0
) -> tuple[DictConfig, list[Problem]]:
    """Compose as much of a recipe as can be; return it, and what is wrong with the overrides."""
    overrides, problems = override_mistakes.pairs(overrides)
    problems += [*hydra_setup.hydra_problems(overrides), *_switches(overrides)]
    accepted = [o for o in unique(overrides) if not hydra_setup.hydra_problems([o])]
    try:
        return hydra_setup.compose(accepted, config_name, number), problems
    except ConfigError as error:
        return OmegaConf.create(), [*problems, *error.problems]
    except RecursionError as error:
        return OmegaConf.create(), [*problems, *translate(error, config_name)]
    except MISTAKES as error:
        config, found = explain(accepted, config_name, error)
        return config, [*problems, *found]


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
    overrides, problems = override_mistakes.pairs(overrides)
    for override in overrides:
        try:
            hydra_setup.parse([override])
        except HydraException as failure:
            problems.append(_unreadable(override, failure))
    return problems


def explain(
    overrides: Sequence[str], config_name: str, error: Exception
) -> tuple[DictConfig, list[Problem]]:
    """Return all that is right, and what is wrong, after composing failed with `error`."""
    problems: list[Problem] = []
    choices: list[str] = []
    values: list[Override] = []
    for override in overrides:
        try:
            parsed = hydra_setup.parse([override])[0]
        except HydraException as failure:
            problems.append(_unreadable(override, failure))
            continue
        group = parsed.key_or_group in hydra_setup.groups()
        wrong = _sweep_problem(parsed, override)
        if group and wrong is None:
            wrong = _choice_problem(parsed, override)
        if wrong is not None:
            problems.append(wrong)
        elif group or hydra_setup.key_of(override).startswith("hydra"):
            choices.append(override)
        else:
            values.append(parsed)
    try:
        config = hydra_setup.compose(choices, config_name)
    except ConfigError as failure:
        return OmegaConf.create(), [*problems, *failure.problems]
    except MISTAKES as failure:
        return OmegaConf.create(), [*problems, *translate(failure, config_name)]
    for parsed in values:
        problems += _apply(parsed, config)
    return config, problems or translate(error, config_name)


def applied(
    overrides: Sequence[str], plain: Mapping[str, object]
) -> tuple[DictConfig, list[Problem]]:
    """Set values in a recipe, inside a session; return it with all that is right, and the problems.

    The overrides are of values, no choices of files.
    """
    config = OmegaConf.merge(hydra_setup.schema(), plain)
    assert isinstance(config, DictConfig)
    overrides, problems = override_mistakes.pairs(overrides)
    problems += [*hydra_setup.hydra_problems(overrides), *_switches(overrides)]
    for override in unique(overrides):
        if hydra_setup.hydra_problems([override]):
            continue
        try:
            parsed = hydra_setup.parse(hydra_setup.opened([override]))[0]
        except HydraException as failure:
            problems.append(_unreadable(override, failure))
            continue
        wrong = _sweep_problem(parsed, override)
        problems += _apply(parsed, config) if wrong is None else [wrong]
    return config, problems


def options_of(group: str) -> list[str]:
    """Return the names of the files of a group; "" stands for the primary files."""
    loader = GlobalHydra.instance().config_loader()
    return list(loader.get_group_options(group, ObjectType.CONFIG))


def _unreadable(override: str, failure: HydraException) -> Problem:
    if "=" not in override:
        known = [*override_mistakes.COMMANDS, *(f"{group}=" for group in hydra_setup.groups())]
        key = override_mistakes.key_for(override)
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


def _switches(overrides: Sequence[str]) -> list[Problem]:
    values: dict[str, object] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if value.lstrip("-").isdigit():
            values[key.lstrip("+")] = int(value)
    return list(override_mistakes.switches(values))


def _sweep_problem(parsed: Override, override: str) -> Problem | None:
    if not parsed.is_sweep_override():
        return None
    return Problem(
        override,
        "several values make several jobs",
        "Add -m to sweep over them; write a list as key=[a,b].",
    )


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
    if parsed.is_add() and key in known and not free:
        return [Problem(line, "there is such a key already", f"Leave out the +: {line[1:]}")]
    if not free and key not in known:
        return [keys.unknown_key(key, known, f"={line.partition('=')[2]}")]
    if parsed.is_delete():
        return _take_out(key, line, known, config)
    try:
        OmegaConf.update(config, key, parsed.value(), merge=True, force_add=free)
    except (OmegaConfBaseException, AssertionError) as failure:
        return [_bad_value(line, failure)]
    return []


def _take_out(key: str, line: str, known: Sequence[str], config: DictConfig) -> list[Problem]:
    """Take an argument of a factory or another free key out, or return why not."""
    if not keys.is_free(key):
        remedy = _instead(key)
        return [Problem(line, "every key of a recipe has a value", remedy)]
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


def _bad_value(line: str, failure: Exception) -> Problem:
    reason = str(getattr(failure, "msg", None) or failure).splitlines()[0]
    return Problem(line, _in_plain_words(reason), "Correct the value.")


TYPES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def _in_plain_words(reason: str) -> str:
    """Return OmegaConf's reason in the words of a person who writes YAML."""
    found = re.search(r"could not be converted to (\w+)|is not a valid (\w+)", reason)
    wanted = found and (found.group(1) or found.group(2))
    if wanted in TYPES:
        return f"it is {TYPES[wanted]}"
    if "is not a subclass of" in reason or "Invalid type assigned" in reason:
        return NODE
    return reason


def _instead(key: str) -> str:
    """Return the remedy for a key of the schema that was to be taken out."""
    parent, _, leaf = key.rpartition(".")
    kind = keys.node_of(parent) if parent else Recipe
    assert kind is not None
    default = next(field.default for field in dataclasses.fields(kind) if field.name == leaf)
    if default is None or type(None) in typing.get_args(typing.get_type_hints(kind)[leaf]):
        return "Set it to null."
    if isinstance(default, (bool, int, float, str)):
        return f"Write {key}={_typed(default)}, the default."
    return "Leave it out."


def _typed(value: float | str) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value)


def translate(error: Exception, config_name: str) -> list[Problem]:
    """Return what a file of `conf/` has wrong, from what composing it raised."""
    text = str(error).strip()
    place, rest = _place(text)
    missing = re.search(r"Could not find '([^']+)'", text)
    if isinstance(error, RecursionError):
        return [conf_files.cycle() or Problem("conf", "files name each other", "End the ring.")]
    if not text:  # Hydra's grammar says nothing of an interpolation that is not closed
        where = conf_files.containing(r"(?m)\$\{[^}\n]*$")
        rule = "an interpolation is not closed" if where else "it cannot be composed"
        return [Problem(f"{where or 'conf'}".rstrip(": "), rule, "Write ${key}, both braces.")]
    if isinstance(error, UnicodeDecodeError):
        return conf_files.undecodable() or [Problem("conf", text, "Save the file as UTF-8.")]
    if missing:
        group, _, option = missing.group(1).rpartition("/")
        known = options_of(group)
        value = f"{place}{group}: {option}"
        if group.startswith("hydra/"):  # chosen on the command line; the file named is Hydra's own
            value = f"{group}={option}"
        found = Problem(value, "there is no such file", nearest(option, known))
        return [foreign_names.plugin(group, option) or found]
    if "primary config" in text:
        return [
            Problem(
                f"--config-name {config_name}",
                "there is no such file in any conf folder",
                nearest(config_name, options_of("")),
            )
        ]
    twice = re.search(r"Multiple values for (\S+)\. To override .* use 'override (.*)'", text)
    if twice:
        group, choice = twice.group(1), twice.group(2)
        where = conf_files.containing(rf"(?m)^\s*-\s*/{re.escape(group)}\s*:")
        rule = f"{group} has a place in every recipe"
        remedy = f"Write `- override /{choice.lstrip('/')}` in its defaults list."
        return [Problem(f"{where}/{choice.lstrip('/')}", rule, remedy)]
    key = re.search(r"full_key: (\S+)", text)
    if key and re.search(r"Key '.*' (not in|is not in)", text):
        name = place.removeprefix("conf/").removesuffix(".yaml: ")
        problem = keys.unknown_key(key.group(1), list(keys.typed_keys()))
        first = Problem(f"{place}{problem.value}", problem.rule, problem.remedy)
        return (conf_files.wrong_keys(name) if name else []) or [first]
    as_text = re.search(r"\w+ is not a subclass of (\w+)\. value: (.*)", text)
    name = next(
        (n for n, k in keys.nodes(Recipe).items() if as_text and k and k.__name__ == as_text[1]), ""
    )
    if as_text and name:
        return [_no_node(f"{place}{name}: {as_text[2]}", name)]
    if key and _in_plain_words(rest) == NODE and key.group(1) in keys.nodes(Recipe):
        return [_no_node(f"{place}{key.group(1)}", key.group(1))]
    if key:
        return [Problem(f"{place}{key.group(1)}", _in_plain_words(rest), "Correct the file.")]
    if isinstance(error, YAMLError):
        rule = f"a file is no YAML: {' '.join(text.split())}"
        remedy = "Indent with spaces, not tabs." if "'\\t'" in text else "Correct the file."
        return [Problem("conf", rule, remedy)]
    return [Problem(place.rstrip(": ") or "conf", " ".join(rest.split()), "Correct the file.")]


def _no_node(value: str, name: str) -> Problem:
    """Return the problem that a file gives a node a plain value, such as the name of its file."""
    chosen = f"Choose its file by `- override /{name}: …` in the defaults list, or w"
    remedy = chosen if options_of(name) else "W"
    return Problem(value, NODE, f"{remedy}rite its keys below it.")


def _place(text: str) -> tuple[str, str]:
    """Return the file that Hydra's message speaks of, as a prefix, and what it says."""
    found = re.match(r"In '([^']+)': (?:\w+ raised while composing config:\s*)?(.*)", text, re.S)
    if found is None:
        return "", text
    first = found.group(2).strip().splitlines()
    return f"conf/{found.group(1)}.yaml: ", first[0] if first else ""
