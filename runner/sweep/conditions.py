"""Conditions of a search: keys that are set only where another one has some value. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from accel.machine.errors import ConfigError, Problems, nearest

WHEN = "hydra.sweeper.when"


@dataclass(frozen=True)
class Condition:
    """A key takes part where another one has one of some values."""

    key: str
    values: tuple[str, ...]


def read(
    when: object,
    found: Mapping[str, BaseDistribution],
    values: Mapping[str, str],
    problems: Problems,
) -> dict[str, tuple[Condition, ...]]:
    """Return the conditions of each swept key, without keys that are never set.

    Args:
        when: key -> condition or list of conditions, all of which must hold.
        found: the values of each swept key.
        values: keys that have the same value in all jobs.
        problems: what is wrong is added here.
    """
    conditions: dict[str, list[Condition]] = {key: [] for key in found}
    never: set[str] = set()
    for key, texts in _flat(when, problems):
        if key not in found and key not in values:
            rule = "a condition is of a swept key"
            problems.add(f"{WHEN}: {key}", rule, nearest(key, found))
        for text in texts if key in found else ():
            condition = _condition(key, text, found, values, problems)
            if condition is None:
                continue
            if condition.key in values:  # fixed: it holds always or never
                if values[condition.key] not in condition.values:
                    never.add(key)
            else:
                conditions[key].append(condition)
    lost = True
    while lost:  # what depends on a key that is never set is not, either
        lost = False
        for key, own in conditions.items():
            if key not in never and any(one.key in never for one in own):
                never.add(key)
                lost = True
    return {key: tuple(own) for key, own in conditions.items() if key not in never}


def _flat(when: object, problems: Problems, above: str = "") -> Iterator[tuple[str, list[str]]]:
    if not isinstance(when, Mapping):
        rule, remedy = "it maps swept keys to conditions", f"Write {WHEN}={{key: 'other=value'}}."
        problems.add(f"{WHEN}={when}", rule, remedy)
        return
    for name, value in when.items():
        if isinstance(value, Mapping):
            yield from _flat(value, problems, f"{above}{name}.")
        else:
            texts = value if isinstance(value, list) else [value]
            yield f"{above}{name}", [str(text) for text in texts]


def _condition(
    key: str,
    text: str,
    found: Mapping[str, BaseDistribution],
    values: Mapping[str, str],
    problems: Problems,
) -> Condition | None:
    """Return the condition that a text such as ``optimizer=sgd,adamw`` stands for."""
    where = f"{WHEN}: {key}: {text}"
    other, equals, listed = (part.strip() for part in text.partition("="))
    wanted = tuple(value.strip() for value in listed.split(",") if value.strip())
    if not equals or not wanted:
        problems.add(where, "a condition is other_key=value", "Write it as 'optimizer=sgd'.")
        return None
    if other == key:
        problems.add(where, "a key does not depend on itself", "Name another swept key.")
        return None
    if other in values:
        return Condition(other, wanted)
    if other not in found:
        others = [name for name in (*found, *values) if name != key]
        problems.add(where, f"{other} is neither swept nor given", nearest(other, others))
        return None
    known = _values(found[other])
    if known is None:
        problems.add(where, f"{other} has no single values", "Sweep it over choice(a,b).")
        return None
    unknown = [value for value in wanted if value not in known]
    for value in unknown:
        problems.add(where, f"{other} is one of {', '.join(known)}", nearest(value, known))
    return None if unknown else Condition(other, wanted)


def _values(distribution: BaseDistribution) -> list[str] | None:
    """Return the values of a swept key as texts; None: there are infinitely many."""
    if isinstance(distribution, CategoricalDistribution):
        return [str(choice) for choice in distribution.choices]
    if isinstance(distribution, IntDistribution):
        return [str(v) for v in range(distribution.low, distribution.high + 1, distribution.step)]
    return None


def hold(conditions: Sequence[Condition], chosen: Mapping[str, str]) -> bool:
    """Return whether all conditions hold for the values chosen so far."""
    return all(chosen.get(condition.key) in condition.values for condition in conditions)


def ordered(conditions: Mapping[str, Sequence[Condition]]) -> list[str]:
    """Return the keys so that each comes after those that its conditions name.

    Raises:
        ConfigError: if they depend on each other.
    """
    left, placed = list(conditions), list[str]()
    while left:
        ready = [key for key in left if all(one.key in placed for one in conditions[key])]
        if not ready:
            rule = "conditions of keys depend on each other"
            raise ConfigError.of(f"{WHEN}: {', '.join(left)}", rule, "Take one of them out.")
        placed += ready
        left = [key for key in left if key not in ready]
    return placed
