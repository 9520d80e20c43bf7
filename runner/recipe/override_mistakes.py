"""Overrides in another grammar: flags, bare words, numbers for true and false. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from accel.machine.errors import Problem, Problems
from runner.recipe import foreign_names, keys

COMMANDS = ("eval", "predict", "list", "show", "compare", "report", "again", "submit")


def key_for(name: str) -> str | None:
    """Return the key that a flag or a bare word stands for, or None."""
    name = name.lstrip("-").replace("-", "_").rstrip(":=")
    typed = list(keys.typed_keys())
    head = name.partition(".")[0]
    if name in typed or ("." in name and head in (*keys.FACTORY_NODES, "callbacks")):
        return name
    if (key := foreign_names.renamed(name)) is not None:
        return key
    same_leaf = [key for key in typed if key.rpartition(".")[2] == name]
    return same_leaf[0] if len(same_leaf) == 1 else None


def pairs(overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Return the overrides without words such as ``seed 3``, and the problems of those."""
    kept: list[str] = []
    problems = Problems()
    words = list(overrides)
    while words:
        word = words.pop(0)
        value = _value_of(word, words)
        if value is None:
            kept.append(word)
            continue
        written, num_words = value
        shown = " ".join([word, *words[:num_words]])
        del words[:num_words]
        rule = "a value is given as key=value, without spaces"
        problems.add(shown, rule, f"Write {key_for(word)}={written}")
    return kept, problems


def _value_of(word: str, following: Sequence[str]) -> tuple[str, int] | None:
    """Return the value that stands behind a bare key, and how many words that are."""
    bare = word.rstrip(":=")
    if not following or "=" in bare or key_for(word) is None or word.startswith("-"):
        return None
    if following[0] == "=" and len(following) > 1 and bare == word:
        return following[1], 2
    if "=" not in following[0] and key_for(following[0]) is None:
        return following[0], 1
    return None


def no_switch(key: str, value: object) -> bool:
    """Return whether a number other than 0 and 1 was given for a key that is true or false."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and value not in (0, 1) and keys.is_switch(key)


def switches(values: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for each number that was given for true or false."""
    for key, value in values.items():
        if no_switch(key, value):
            yield Problem(f"{key}={value}", "it is true or false", "Correct the value.")
