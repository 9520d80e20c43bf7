"""The space of a search: which keys are swept over which values, and when. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    RangeSweep,
    Sweep,
    Transformer,
)
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.trial import Trial

from accel.machine.errors import ConfigError, Problems, nearest
from runner.recipe import diagnose, hydra_setup

WHEN = "hydra.sweeper.when"
LOG = "log"


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

    def suggest(self, trial: Trial) -> str:
        """Return the sampler's choice, as it is written on a command line."""
        found = json.loads(distribution_to_json(self.distribution))
        kind = found["name"].removesuffix("Distribution").lower()
        return self._text(getattr(trial, f"suggest_{kind}")(self.key, **found["attributes"]))

    def examples(self) -> list[str]:
        """Return each categorical value; of numbers both ends, and a fraction between them."""
        found = self.distribution
        if isinstance(found, CategoricalDistribution):
            return self.listed()
        values: list[float] = [found.low, found.high]
        if isinstance(found, FloatDistribution) and found.step is None:
            values.insert(1, found.low + 0.381966 * (found.high - found.low))
        return list(dict.fromkeys(map(self._text, values)))

    def listed(self) -> list[str]:
        """Return all values; none where they are fractions."""
        found = self.distribution
        if isinstance(found, CategoricalDistribution):
            return [str(choice) for choice in found.choices]
        if isinstance(found, IntDistribution):
            return [str(value) for value in range(found.low, found.high + 1, found.step)]
        return []

    def _text(self, value: object) -> str:
        if isinstance(self.distribution, FloatDistribution) and self.distribution.step is not None:
            value = float(f"{value:.12g}")  # a sum of steps has rounding errors
        return str(value)


@dataclass(frozen=True)
class Space:
    """What is searched.

    Args:
        fixed: overrides that all jobs have, by key.
        parameters: the swept keys, each after those that its conditions name.
    """

    fixed: Mapping[str, str]
    parameters: tuple[Parameter, ...]

    @classmethod
    def read(
        cls,
        overrides: Sequence[str],
        params: Mapping[str, Any],
        when: Mapping[str, Any],
        chosen: str = "optuna",
    ) -> Space:
        """Read a space from overrides, `hydra.sweeper.params` and `.when`, inside a session.

        Overrides of Hydra's own configuration are left out; others go before `params`. `chosen` is
        `hydra/sweeper`.

        Raises:
            ConfigError: naming everything that is wrong.
        """
        own = [o for o in overrides if not hydra_setup.key_of(o).startswith(("hydra.", "hydra/"))]
        given = {hydra_setup.key_of(o) for o in own}
        lines = [*own, *(f"{key}={v}" for key, v in _flat(params) if key not in given)]
        ConfigError.raise_if(diagnose.unreadable(lines))
        fixed: dict[str, str] = {}
        found: dict[str, Parameter] = {}
        problems = Problems()
        for line, parsed in zip(lines, hydra_setup.parse(lines), strict=True):
            key = parsed.key_or_group
            if not parsed.is_sweep_override():
                fixed[hydra_setup.key_of(line)] = line
                continue
            try:
                prefix = parsed.get_key_element().removesuffix(key)
                found[key] = Parameter(key, prefix, distribution_of(parsed))
            except ConfigError as error:
                problems += error.problems
        if not found and not problems:
            rule = "the sweep searches no key"
            remedy = "Give a range, as in optimizer.lr='tag(log, interval(1e-4, 1e-1))'."
            problems.add(f"hydra/sweeper={chosen}", rule, remedy)
        problems.raise_if()
        return cls(fixed, _conditional(found, fixed, when))

    def sample(self, trial: Trial) -> list[str]:
        """Return the overrides of a job: the fixed ones and those that the sampler chooses."""
        return self._job(lambda parameter: parameter.suggest(trial))

    def probes(self) -> list[list[str]]:
        """Return jobs in which each example of each key stands at least once."""
        needed: dict[str, dict[str, str]] = {}  # values of other keys under which a key is set
        found = [self._probe({})]
        for parameter in self.parameters:
            own = needed[parameter.key] = {}
            for one in parameter.conditions:
                own |= {**needed.get(one.key, {}), one.key: one.values[0]}
            found += [self._probe({**own, parameter.key: v}) for v in parameter.examples()]
        return [list(job) for job in dict.fromkeys(map(tuple, found))]

    def _probe(self, wanted: Mapping[str, str]) -> list[str]:
        return self._job(lambda one: wanted.get(one.key) or one.examples()[0])

    def _job(self, choose: Callable[[Parameter], str]) -> list[str]:
        values = {key: line.partition("=")[2] for key, line in self.fixed.items()}
        job = list(self.fixed.values())
        for one in self.parameters:
            if all(values.get(other.key) in other.values for other in one.conditions):
                values[one.key] = choose(one)
                job.append(f"{one.prefix}{one.key}={values[one.key]}")
        return job


def _flat(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and the values of a mapping that is nested or has dotted keys."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", "null" if value is None else value


# -- ranges --------------------------------------------------------------------------------


def distribution_of(found: Override) -> BaseDistribution:
    """Return the values of a swept key; a ConfigError if there are none."""
    sweep: Any = found.value()
    line = str(found.input_line)
    tags = sweep.tags if isinstance(sweep, Sweep) else set()
    for tag in tags - ({LOG} if isinstance(sweep, IntervalSweep | RangeSweep) else set()):
        rule, remedy = f"it has no tag {tag!r}", "Write tag(log, …) around an interval or a range."
        raise ConfigError.of(line, rule, remedy)
    try:
        if isinstance(sweep, IntervalSweep):
            return _numbers(sweep.start, sweep.end, log=LOG in tags)
        if isinstance(sweep, RangeSweep):
            values = sorted(sweep.range())
            if not values:
                raise ValueError("the range is empty")
            return _numbers(values[0], values[-1], log=LOG in tags, step=abs(sweep.step))
        listed = found.sweep_string_iterator()
        if isinstance(sweep, ChoiceSweep):  # the iterator would shuffle
            listed = map(Transformer.str, sweep.list)
        return CategoricalDistribution(list(dict.fromkeys(listed)))
    except ValueError as error:
        rule = f"Optuna refuses it ({' '.join(str(error).split())})"
        raise ConfigError.of(line, rule, "Change its ends, its step, or tag(log, …).") from error


def _numbers(low: Any, high: Any, **others: Any) -> BaseDistribution:
    kind: Any = IntDistribution if isinstance(low, int) else FloatDistribution
    return kind(low, high, **others)


# -- conditions ----------------------------------------------------------------------------


def _conditional(
    found: Mapping[str, Parameter], fixed: Mapping[str, str], when: Mapping[str, Any]
) -> tuple[Parameter, ...]:
    """Return swept keys with their conditions, each after those that its conditions name.

    Args:
        found: the swept keys.
        fixed: overrides of keys that have the same value in all jobs.
        when: key -> condition or list of conditions, all of which must hold.
    """
    problems, known = Problems(), {**fixed, **found}
    conditions: dict[str, tuple[Condition, ...]] = dict.fromkeys(found, ())
    for key, texts in _flat(when):
        if key not in known:
            problems.add(f"{WHEN}: {key}", "a condition is of a swept key", nearest(key, found))
        for text in map(str, texts if isinstance(texts, list) else [texts]):
            other, _, listed = (part.strip() for part in text.partition("="))
            if other not in known or not listed:
                rule = "a condition is key=value of another key that is swept or given"
                problems.add(f"{WHEN}: {key}: {text}", rule, nearest(other, known))
                continue
            values = tuple(value.strip() for value in listed.split(","))
            choices = found[other].listed() if other in found else values
            for value in [one for one in values if one not in choices]:
                rule = f"{other} is one of {', '.join(choices) or 'no list'}"
                problems.add(f"{WHEN}: {key}: {text}", rule, nearest(value, choices))
            conditions[key] = (*conditions.get(key, ()), Condition(other, values))
    problems.raise_if()
    above = {key: [one.key for one in own if one.key in found] for key, own in conditions.items()}
    try:
        order = [key for key in TopologicalSorter(above).static_order() if key in found]
    except CycleError as error:
        rule = "conditions of keys depend on each other"
        raise ConfigError.of(f"{WHEN}: {', '.join(error.args[1])}", rule, "Take one out.") from None
    return tuple(replace(found[key], conditions=conditions[key]) for key in order)
