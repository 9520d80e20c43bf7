"""The space of a search: which keys are swept over which values, and when. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    RangeSweep,
    Sweep,
    Transformer,
)
from hydra.errors import HydraException
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import Trial

from accel.machine.errors import ConfigError, Problems, nearest
from runner.recipe import hydra_setup, keys

PARAMS = "hydra.sweeper.params"
WHEN = "hydra.sweeper.when"
LOG = "log"
WHOLE = (int, int | None)


@dataclass(frozen=True)
class Condition:
    """A key takes part where another one has one of some values."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Parameter:
    """A swept key: its values, and the conditions under which it is set.

    `prefix` is what Hydra wants before the key, such as ``++``. Categorical values are texts as
    they are written on a command line.
    """

    key: str
    prefix: str
    distribution: BaseDistribution
    conditions: tuple[Condition, ...] = ()

    @property
    def is_categorical(self) -> bool:
        """Whether the values are a list, without order or distances."""
        return isinstance(self.distribution, CategoricalDistribution)

    def suggest(self, trial: Trial) -> str:
        """Return the sampler's choice, as it is written on a command line."""
        chosen = self.distribution
        if isinstance(chosen, CategoricalDistribution):
            return str(trial.suggest_categorical(self.key, chosen.choices))
        if isinstance(chosen, IntDistribution):
            return str(
                trial.suggest_int(
                    self.key, chosen.low, chosen.high, step=chosen.step, log=chosen.log
                )
            )
        assert isinstance(chosen, FloatDistribution)
        value = trial.suggest_float(
            self.key, chosen.low, chosen.high, step=chosen.step, log=chosen.log
        )
        return _text(value, chosen)

    def examples(self) -> list[str]:
        """Return each categorical value; of numbers both ends, and a value between them."""
        chosen = self.distribution
        if isinstance(chosen, CategoricalDistribution):
            return [str(choice) for choice in chosen.choices]
        if isinstance(chosen, IntDistribution):
            return list(dict.fromkeys((str(chosen.low), str(chosen.high))))
        assert isinstance(chosen, FloatDistribution)
        between = math.sqrt(chosen.low * chosen.high) if chosen.log else None
        if chosen.step is None and between is None:
            between = chosen.low + 0.381966 * (chosen.high - chosen.low)  # no round number
        ends = [chosen.low, chosen.high] if between is None else [chosen.low, between, chosen.high]
        return list(dict.fromkeys(_text(value, chosen) for value in ends))


def _text(value: float, chosen: FloatDistribution) -> str:
    # Multiples of a step come with the last digits of an addition.
    return repr(value if chosen.step is None else float(f"{value:.12g}"))


@dataclass(frozen=True)
class Space:
    """Overrides that all jobs have, and the swept keys, conditions before what depends on them."""

    fixed: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    @classmethod
    def read(
        cls, overrides: Sequence[str], params: object, when: object, chosen: str = "optuna"
    ) -> Space:
        """Read a space from overrides, `hydra.sweeper.params` and `.when`, inside a session.

        Overrides of Hydra's own configuration are left out; others go before `params`.

        Raises:
            ConfigError: naming everything that is wrong.
        """
        problems = Problems()
        own = [o for o in overrides if not hydra_setup.key_of(o).startswith(("hydra.", "hydra/"))]
        given = {hydra_setup.key_of(o) for o in own}
        listed = [(k, v) for k, v in _flat(params, problems) if k not in given]
        lines = [*own, *(f"{key}={value}" for key, value in listed)]
        fixed: list[str] = []
        found: dict[str, Parameter] = {}
        for line in lines:
            parsed = parsed_override(line, problems)
            if parsed is None:
                continue
            if not parsed.is_sweep_override():
                fixed.append(line)
                continue
            try:
                distribution = distribution_of(parsed)
            except ConfigError as error:
                problems += error.problems
                continue
            if _is_fraction(distribution) and keys.hint_of(parsed.key_or_group) in WHOLE:
                value = parsed.get_value_string()
                shown, rule = line, "it is a whole number"
                problems.add(shown, rule, f"Write {parsed.key_or_group}='int({value})'.")
                continue
            prefix = parsed.get_key_element().removesuffix(parsed.key_or_group)
            found[parsed.key_or_group] = Parameter(parsed.key_or_group, prefix, distribution)
        values = {hydra_setup.key_of(line): line.partition("=")[2] for line in fixed}
        choices = {key: one.distribution for key, one in found.items()}
        active = read_conditions(when, choices, values, problems)
        if not found and not problems:
            rule = "the sweep searches no key"
            remedy = "Give a range, as in optimizer.lr='tag(log, interval(1e-4, 1e-1))'."
            problems.add(f"hydra/sweeper={chosen}", rule, remedy)
        problems.raise_if()
        ordered = in_order(active)
        return cls(tuple(fixed), tuple(replace(found[k], conditions=active[k]) for k in ordered))

    def sample(self, trial: Trial) -> list[str]:
        """Return the overrides of a job: the fixed ones and those that the sampler chooses."""
        chosen: dict[str, str] = {}
        for parameter in self.parameters:
            if hold(parameter.conditions, chosen):
                chosen[parameter.key] = parameter.suggest(trial)
        return self._overrides(chosen)

    def probes(self) -> list[list[str]]:
        """Return jobs in which each example of each key stands at least once."""
        found = [self._probe({})]
        for parameter in self.parameters:
            needed = self._needed(parameter)
            for value in parameter.examples():
                found.append(self._probe({**needed, parameter.key: value}))
        unique = dict.fromkeys(map(tuple, found))
        return [list(job) for job in unique]

    def _needed(self, parameter: Parameter) -> dict[str, str]:
        """Return values of other keys under which a parameter is set."""
        by_key = {one.key: one for one in self.parameters}
        needed: dict[str, str] = {}
        for condition in parameter.conditions:
            needed |= self._needed(by_key[condition.key])
            needed[condition.key] = condition.values[0]
        return needed

    def _probe(self, wanted: Mapping[str, str]) -> list[str]:
        chosen: dict[str, str] = {}
        for parameter in self.parameters:
            if hold(parameter.conditions, chosen):
                chosen[parameter.key] = wanted.get(parameter.key, parameter.examples()[0])
        return self._overrides(chosen)

    def _overrides(self, chosen: Mapping[str, str]) -> list[str]:
        prefixes = {one.key: one.prefix for one in self.parameters}
        swept = [f"{prefixes[key]}{key}={value}" for key, value in chosen.items()]
        return [*self.fixed, *swept]


def _is_fraction(distribution: BaseDistribution) -> bool:
    return isinstance(distribution, FloatDistribution) and distribution.step is None


def _flat(params: object, problems: Problems, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, value as on a command line) of nested or dotted `params`."""
    if not isinstance(params, Mapping):
        rule = "it maps keys of the recipe to ranges"
        problems.add(f"{PARAMS}={params}", rule, f"Write {PARAMS}={{optimizer.lr: 'a,b'}}.")
        return
    for name, value in params.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, problems, f"{key}.")
        elif isinstance(value, list):
            words = ", ".join(str(word) for word in value)
            rule, remedy = "a range is a text", f'Write {key}: "choice({words})".'
            problems.add(f"{PARAMS}: {key}: {value}", rule, remedy)
        else:
            yield key, "null" if value is None else str(value)


# -- ranges --------------------------------------------------------------------------------


def parsed_override(line: str, problems: Problems) -> Override | None:
    """Return an override as Hydra reads it; None, and a problem, where it cannot."""
    try:
        return hydra_setup.parse([line])[0]
    except HydraException as error:
        rule = f"it cannot be read: {str(error).splitlines()[0]}"
        remedy = "Ranges are interval(a,b), range(a,b,step), choice(a,b), tag(log, interval(a,b))."
        problems.add(line, rule, remedy)
        return None


def distribution_of(found: Override) -> BaseDistribution:
    """Return the values of a swept key; a ConfigError if there are none."""
    sweep: Any = found.value()
    line = str(found.input_line)
    tags = sweep.tags if isinstance(sweep, Sweep) else set()
    for tag in sorted(tags - {LOG}):
        raise ConfigError.of(line, f"there is no tag {tag!r}", "The one tag is log.")
    if not isinstance(sweep, IntervalSweep | RangeSweep):
        if tags:
            remedy = "Tag an interval, as in tag(log, interval(1e-4, 1e-1))."
            raise ConfigError.of(line, "a list of values has no scale", remedy)
        return _choices(found, line, sweep)
    try:
        return (_interval if isinstance(sweep, IntervalSweep) else _range)(sweep, LOG in tags)
    except ValueError as error:
        rule = f"Optuna refuses it ({' '.join(str(error).split())})"
        raise ConfigError.of(line, rule, "Change its ends, its step, or tag(log, …).") from error


def _choices(found: Override, line: str, sweep: object) -> BaseDistribution:
    if isinstance(sweep, ChoiceSweep):  # not its iterator, which would shuffle
        values = [Transformer.str(value) for value in sweep.list]
    else:
        values = list(found.sweep_string_iterator())
    if not values:
        raise ConfigError.of(line, "it has no values", "Give choice(a,b,c).")
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ConfigError.of(line, f"{twice[0]} stands there twice", "Give each value once.")
    return CategoricalDistribution(values)


def _interval(sweep: Any, log: bool) -> BaseDistribution:
    if isinstance(sweep.start, int) and isinstance(sweep.end, int):
        return IntDistribution(sweep.start, sweep.end, log=log)
    return FloatDistribution(sweep.start, sweep.end, log=log)


def _range(sweep: Any, log: bool) -> BaseDistribution:
    start, stop, step = (Decimal(str(value)) for value in (sweep.start, sweep.stop, sweep.step))
    count = math.ceil((stop - start) / step) if step else 0
    if count <= 0:
        raise ValueError("a range ends before its second number")
    low, high = sorted((start, start + (count - 1) * step))
    if all(isinstance(value, int) for value in (sweep.start, sweep.stop, sweep.step)):
        return IntDistribution(int(low), int(high), log=log, step=int(abs(step)))
    return FloatDistribution(float(low), float(high), log=log, step=float(abs(step)))


# -- conditions ----------------------------------------------------------------------------


def read_conditions(
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
    for key, texts in _flat_conditions(when, problems):
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


def _flat_conditions(
    when: object, problems: Problems, above: str = ""
) -> Iterator[tuple[str, list[str]]]:
    if not isinstance(when, Mapping):
        rule, remedy = "it maps swept keys to conditions", f"Write {WHEN}={{key: 'other=value'}}."
        problems.add(f"{WHEN}={when}", rule, remedy)
        return
    for name, value in when.items():
        if isinstance(value, Mapping):
            yield from _flat_conditions(value, problems, f"{above}{name}.")
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


def in_order(conditions: Mapping[str, Sequence[Condition]]) -> list[str]:
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
