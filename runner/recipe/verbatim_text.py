"""Values of keys that hold text stay the text that was typed: ``name=1_2_1`` is no number.

Hydra's grammar and YAML read some words as numbers, dates or true and false, and OmegaConf turns
those into text again: ``121`` for ``1_2_1``, ``1000.0`` for ``1e3``, ``True`` for ``on``. Free of
torch.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from omegaconf._utils import get_yaml_loader

from accel.machine.errors import Problem
from runner.recipe import keys

TEXT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:null")
# A single word between the separators of lists and sweeps, without quotes or interpolations;
# several words are text already.
WORD = re.compile(r"(?:^|(?<=[\[,=(]))(\s*)([^\s,\[\](){}'\"$=]+)(\s*)(?=[\],)]|$)")


@cache
def text_keys() -> frozenset[str]:
    """Return the dotted keys of the schema that hold text, or a list of texts."""
    return frozenset(key for key in keys.typed_keys() if _is_text(keys.hint_of(key)))


def _is_text(hint: object) -> bool:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return all(_is_text(part) for part in typing.get_args(hint) if part is not type(None))
    return hint is str or hint == list[str]


def quoted(overrides: Sequence[str]) -> list[str]:
    """Return overrides with quotes around words of text keys that Hydra would not take for text."""
    return [_quoted(override) for override in overrides]


def _quoted(override: str) -> str:
    key, equals, value = override.partition("=")
    if key.lstrip("+~") not in text_keys() or not equals:
        return override
    if any(mark in value for mark in "'\"$\\") or re.search(r"(?<!choice)\(", value):
        return override
    return f"{key}={WORD.sub(_in_quotes, value)}"


def _in_quotes(word: re.Match[str]) -> str:
    before, text, after = word.groups()
    if text == "choice" or re.fullmatch(r"null", text, re.IGNORECASE):
        return word.group()
    is_text = _tag(text) in TEXT_TAGS and not _is_number(text)
    return word.group() if is_text else f"{before}'{text}'{after}"


def _is_number(text: str) -> bool:
    # Hydra's grammar knows more numbers than YAML 1.2, and nan, inf, true and false in any case.
    return bool(re.fullmatch(r"[+-]?[\d_.]+(e[+-]?[\d_]+)?|[+-]?(nan|inf)", text, re.IGNORECASE))


def _tag(text: str) -> str:
    try:
        node = yaml.compose(text, Loader=get_yaml_loader())
    except yaml.YAMLError:  # as of "@me" or "*all", which Hydra takes for text
        return TEXT_TAGS[0]
    return str(node.tag) if isinstance(node, yaml.ScalarNode) else TEXT_TAGS[0]


def problems_of(path: Path, prefix: str) -> Iterator[Problem]:
    """Yield text keys of a file of `conf/` whose value YAML does not read as text.

    `prefix` is where its keys stand in a recipe, e.g. "tracker."; empty: at the top.
    """
    with path.open(encoding="utf-8") as file:
        root = yaml.compose(file, Loader=get_yaml_loader())
    for key, value in _scalars(root, prefix):
        if key in text_keys() and value.tag not in TEXT_TAGS:
            yield Problem(
                f"{path}: {key}: {value.value}",
                f"it is text, and YAML reads {value.value} as {_named(value.tag)}",
                f'Write {key.rpartition(".")[2]}: "{value.value}".',
            )


def _scalars(node: object, key: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _scalars(value, f"{key}{name.value}.")
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _scalars(value, key)
    elif isinstance(node, yaml.ScalarNode):
        yield key.removesuffix("."), node


def _named(tag: str) -> str:
    kind = tag.rpartition(":")[2]
    return {"int": "a number", "float": "a number", "bool": "true or false"}.get(kind, kind)
