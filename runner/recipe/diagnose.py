"""Composing a recipe from words, and every mistake in them with its remedy. Free of torch.

Hydra stops at the first mistake and speaks of it in its own terms. So Hydra composes the chosen
files alone; values are set here, one by one, and each mistake is reported beside the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from accel.machine.errors import ConfigError, Problem, did_you_mean, nearest
from runner.recipe import hydra_setup, keys, paths
from runner.recipe.schema import PLUGINS, Recipe
from runner.recipe.serialization import typed

# What composing raises for a mistake of the user's; OmegaConf stumbles over null nodes.
MISTAKES = (
    *(HydraException, OmegaConfBaseException, YAMLError),
    *(AssertionError, AttributeError, ValueError, OSError, RecursionError),
)
AS_PAIRS = "a value is given as key=value, without spaces"


@dataclasses.dataclass
class Words:
    """The words of a command line, sorted: choices of files, values, and mistakes."""

    choices: list[str]
    values: list[Override]
    problems: list[Problem]


def sorted_words(overrides: Sequence[str]) -> Words:
    """Sort overrides without sweeps; of several of one key the last is taken."""
    found = Words([], [], unreadable(overrides))
    wrong, groups = {problem.value for problem in found.problems}, hydra_setup.groups()
    for override in unique(overrides):
        if override in wrong:
            continue
        parsed = hydra_setup.parse([override])[0]
        mapping = not parsed.is_delete() and isinstance(parsed.value(), dict)
        group = parsed.key_or_group in groups and not mapping
        problem = next(iter(hydra_setup.hydra_problems([override])), None)
        if parsed.is_sweep_override():
            remedy = "Add -m to sweep over them; write a list as key=[a,b]."
            problem = Problem(override, "several values make several jobs", remedy)
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
) -> tuple[DictConfig, list[Problem]]:
    """Compose as much of a recipe as can be.

    Returns:
        The recipe, empty where its files do not compose; what is wrong.
    """
    words = sorted_words(overrides)
    try:
        config = hydra_setup.compose(words.choices, config_name, number, overrides)
    except ConfigError as error:
        return OmegaConf.create(), [*words.problems, *error.problems]
    except MISTAKES as error:
        problems = translate(error, config_name, words.choices)
        return OmegaConf.create(), [*words.problems, *problems]
    return config, [*words.problems, *apply(words.values, config)]


def unique(overrides: Sequence[str]) -> list[str]:
    """Return the last override of each key."""
    return list({hydra_setup.key_of(override): override for override in overrides}.values())


def overridden(overrides: Sequence[str]) -> list[str]:
    """Return a line for each override that a later one of the same key overrides."""
    last = {hydra_setup.key_of(override): override for override in overrides}
    return [
        f"{override} is overridden by {last[key]}: the last one of a key is taken"
        for override in overrides
        if last[key := hydra_setup.key_of(override)] is not override
    ]


def unreadable(overrides: Sequence[str]) -> list[Problem]:
    """Return a problem for each override that Hydra's grammar does not read."""
    problems = []
    for index, override in enumerate(overrides):
        problem = _bare_key(override, overrides[index + 1 :])
        try:
            hydra_setup.parse([override])
        except HydraException as failure:
            reason = str(failure).splitlines()[0]
            remedy = "Quote special characters: \"key='a, b'\". A list is [a,b], a mapping {a: 1}."
            problem = problem or Problem(override, f"it cannot be read: {reason}", remedy)
        if problem is not None:
            problems.append(problem)
    return problems


def _bare_key(word: str, following: Sequence[str]) -> Problem | None:
    """Return the problem of ``seed 3``, ``seed: 3``, ``seed = 3``, and of a word alone."""
    bare = word.rstrip("=:")
    others = [one for one in following[:2] if one != "="][:1]
    values = [one for one in others if "=" not in one and keys.key_for(one) is None]
    if "=" in bare or not bare or (word.endswith("=") and not values):
        return None
    key = keys.key_for(bare)
    if key is not None:
        return Problem(word, AS_PAIRS, f"Write {key}={values[0] if values else '…'}")
    if word != bare or word.startswith(("~", "+")):
        return None
    known = [*keys.COMMANDS, *(f"{group}=" for group in hydra_setup.groups())]
    return Problem(word, "it is neither a command nor key=value", nearest(word, known))


def options_of(group: str) -> list[str]:
    """Return the names of the files of a group; "" stands for the primary files."""
    loader = GlobalHydra.instance().config_loader()
    return list(loader.get_group_options(group, ObjectType.CONFIG))


def _choice_problem(parsed: Override, override: str) -> Problem | None:
    group, known = parsed.key_or_group, options_of(parsed.key_or_group)
    if parsed.package is not None:
        return Problem(override, f"{group} has one place in a recipe", f"Write {group}=…")
    value = None if parsed.is_delete() else parsed.value()
    values = value if isinstance(value, list) else [] if value is None else [value]
    for option in map(str, values):
        if option not in known:
            others = [
                name for name in PLUGINS if option in options_of(name) and option != "default"
            ]
            remedy = did_you_mean(f"{others[0]}={option}") if others else nearest(option, known)
            return Problem(f"{group}={option}", f"{group} is one of {', '.join(known)}", remedy)
    has_place = group in PLUGINS or (paths.conf_folder() / group).is_dir()
    if (parsed.is_add() or parsed.is_force_add()) and has_place:
        rule = f"{group} has a place in every recipe"
        return Problem(override, rule, f"Leave out the +: {override.lstrip('+')}")
    return None


# -- values --------------------------------------------------------------------------------


def apply(values: Sequence[Override], config: DictConfig) -> list[Problem]:
    """Set values in a recipe, and return what is wrong with those that cannot be set.

    What names a factory goes first: the arguments that the node has belong to the one before.
    """
    ordered = sorted(values, key=lambda parsed: _factory_node(parsed) is None)
    return [problem for parsed in ordered if (problem := _apply(parsed, config)) is not None]


def _factory_node(parsed: Override) -> str | None:
    """Return the node whose factory an override names, by ``model.name=x`` or ``model={name: x}``.

    None: it names none.
    """
    key, value = parsed.key_or_group, None if parsed.is_delete() else parsed.value()
    node, _, leaf = key.rpartition(".")
    if keys.names_factory(node) and leaf in ("name", "_target_"):
        return node
    named = isinstance(value, dict) and {"name", "_target_"} & set(map(str, value))
    return key if keys.names_factory(key) and named else None


def _apply(parsed: Override, config: DictConfig) -> Problem | None:
    """Set one value, or return why not."""
    key, line = parsed.key_or_group, str(parsed.input_line)
    content: Any = OmegaConf.to_container(config, resolve=False)
    value = None if parsed.is_delete() else parsed.value()
    whole = isinstance(value, dict)
    off = keys.switched_off(f"{key}.*" if whole else key, content)
    if off is not None and keys.node_of(off) is not None:
        return _switched_off(off, line)
    known = keys.known_keys(content)
    if parsed.is_add() and key in known and not whole:
        return Problem(line, "there is such a key already", f"Leave out the +: {line[1:]}")
    if parsed.is_delete():
        return _take_out(key, line, known, config)
    node = _factory_node(parsed)
    if node is not None:
        _rename(node, key, value, config)
    return set_value(config, key, value, line)


def set_value(config: DictConfig, key: str, value: object, line: str) -> Problem | None:
    """Set a value of the schema's type, or return the problem of `line`, which gives it."""
    if keys.is_switch(key) and type(value) is int and value not in (0, 1):
        return Problem(line, _rule_of(key), "Correct the value.")  # OmegaConf takes it for true
    try:
        # Merged, an empty mapping would change nothing.
        OmegaConf.update(config, key, value, merge=value != {}, force_add=True)
    except (OmegaConfBaseException, AssertionError, TypeError) as failure:
        reason = str(getattr(failure, "msg", None) or failure).splitlines()[0]
        return Problem(line, _rule_of(key) or reason, "Correct the value.")
    return None


def _rename(node: str, key: str, value: Any, config: DictConfig) -> None:
    """Empty a node whose factory is not the one that a value at `key` names."""
    given = value if node == key else {key.rpartition(".")[2]: value}
    now = OmegaConf.select(config, node)
    named = {str(name): item for name, item in given.items()}
    if hydra_setup.factory_named(now) != hydra_setup.factory_named(named):
        OmegaConf.update(config, node, {}, merge=False, force_add=True)


def _take_out(key: str, line: str, known: Sequence[str], config: DictConfig) -> Problem | None:
    """Take an argument of a factory or another free key out, or return why not."""
    if key not in known:
        return keys.unknown_key(key, known)
    if key in keys.typed_keys():
        return Problem(line, "every key of a recipe has a value", f"Give {key}=… another one.")
    parent, _, leaf = key.rpartition(".")
    del OmegaConf.select(config, parent)[leaf]
    return None


def _switched_off(node: str, line: str) -> Problem:
    if node in hydra_setup.groups():
        known = [f"{node}={option}" for option in options_of(node)]
        return Problem(line, f"{node} is off", f"Switch it on with {' or '.join(known)}.")
    head, _, leaf = node.rpartition(".")
    return Problem(line, f"{node} is off", f"Switch it on with {head}={leaf}.")


TYPES: dict[object, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "text"},
    **{list[str]: "a list of texts", type(None): "null"},
}


def _rule_of(key: str) -> str:
    """Return the type of a key of the schema in the words of a person who writes YAML, or ""."""
    if keys.node_of(key) is not None:
        return "it is a node with keys of its own"
    hint = keys.hint_of(key)
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = [TYPES.get(part, "") for part in parts]
    return f"it is {' or '.join(words)}" if all(words) else ""


# -- files ---------------------------------------------------------------------------------


def translate(error: Exception, config_name: str, choices: Sequence[str] = ()) -> list[Problem]:
    """Return what is wrong with files of `conf/`, from the error that composing them raised."""
    if isinstance(error, MissingConfigException):
        return [_missing_file(str(error.missing_cfg_file), config_name)]
    wrong: list[Problem] = []
    with contextlib.suppress(*MISTAKES):  # the same error, in a file that cannot be read at all
        for name, node in hydra_setup.own_nodes(choices, config_name):
            wrong += _wrong_values(name, OmegaConf.to_container(node, resolve=False))
    return wrong or [_of_file(error)]


def _wrong_values(name: str, content: object, prefix: str = "") -> Iterator[Problem]:
    """Yield the problem of each value of a file that its key of the schema does not take."""
    for leaf, value in content.items() if isinstance(content, Mapping) else ():
        key = f"{prefix}{leaf}"
        if isinstance(value, Mapping) and keys.node_of(key) is not None:
            yield from _wrong_values(name, value, f"{key}.")
        elif keys.hint_of(key) is not None:
            found = set_value(typed().copy(), key, value, f"{name}: {key}: {value}")
            if found is not None and key in hydra_setup.groups():
                remedy = f"Write `- override /{key}: …` in the defaults list, or keys below it."
                found = dataclasses.replace(found, remedy=remedy)
            yield from () if found is None else (found,)


def _of_file(error: Exception) -> Problem:
    """Return what keeps a file of the user's from being read, or from a defaults list."""
    text, cause = " ".join(str(error).split()), error.__cause__
    inside = re.match(r"In '([^']+)': (.*)", text)
    if inside is not None:
        return Problem(f"conf/{inside[1]}.yaml", inside[2].rstrip("."), "Correct the file.")
    if isinstance(error, YAMLError):  # it has the path
        remedy = "Indent with spaces, not tabs." if "'\\t'" in text else "Correct the file."
        return Problem("conf", f"it is no YAML: {text}", remedy)
    has, rule, remedy = b"defaults:", text.rstrip("."), "Correct the defaults list."
    if isinstance(error, RecursionError):
        rule = "a defaults list leads back to its own file"
    elif isinstance(error, UnicodeDecodeError):
        has, rule, remedy = error.object, f"it is not UTF-8 text ({error})", "Save it as UTF-8."
    elif isinstance(cause, GrammarParseError):
        has, rule = str(cause.value).encode(), "an interpolation is not closed"
        remedy = "Write ${key}, both braces."
    named = [name for path, name in hydra_setup.own_files() if has in path.read_bytes()]
    return Problem(", ".join(named) or "conf", rule, remedy)


def _missing_file(name: str, config_name: str) -> Problem:
    group, _, option = name.rpartition("/")
    if not group and option == config_name:
        rule = "there is no such file in any conf folder"
        return Problem(f"--config-name {config_name}", rule, nearest(option, options_of("")))
    remedy = nearest(option, options_of(group))
    return Problem(f"{group}={option}", "there is no such file", remedy)


def placed(problem: Problem, overrides: Sequence[str], config_name: str) -> Problem:
    """Return the problem of a key with the file of the user's that sets it."""
    key, choices = problem.value.partition("=")[0], sorted_words(overrides).choices
    for name, node in hydra_setup.own_nodes(choices, config_name):
        content: Any = OmegaConf.to_container(node, resolve=False)
        if key not in keys.keys_of(content):
            continue
        head, _, rest = key.partition(".")
        if rest and head in hydra_setup.groups() and head not in keys.nodes(Recipe):
            remedy = "Write `# @package _global_` as the first line of the file."
            problem = dataclasses.replace(problem, remedy=remedy)
        return dataclasses.replace(problem, value=f"{name}: {problem.value}")
    return problem
