"""The space of a search: which keys are swept over which values, and when. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import Trial

from accel.machine.errors import ConfigError, Problems
from runner.recipe import hydra_setup, keys
from runner.sweep import conditions, ranges
from runner.sweep.conditions import Condition

PARAMS = "hydra.sweeper.params"
WHOLE = (int, int | None)


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

    def value_of(self, text: str) -> str | float:
        """Return the value that stands on a command line as `text`, for a sampler.

        Raises:
            ValueError: if it is none of this parameter's.
        """
        known = self.distribution
        if isinstance(known, CategoricalDistribution):
            if text not in known.choices:
                raise ValueError(text)
            return text
        assert isinstance(known, IntDistribution | FloatDistribution)
        value = int(text) if isinstance(known, IntDistribution) else float(text)
        if not known.low <= value <= known.high:
            raise ValueError(text)
        return value

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
        for line in hydra_setup.opened(lines):
            parsed = ranges.parsed(line, problems)
            if parsed is None:
                continue
            if not parsed.is_sweep_override():
                fixed.append(line)
                continue
            try:
                distribution = ranges.distribution(parsed)
            except ConfigError as error:
                problems += error.problems
                continue
            if _is_fraction(distribution) and keys.hint_of(parsed.key_or_group) in WHOLE:
                value = parsed.get_value_string()
                shown, rule = hydra_setup.closed(line), "it is a whole number"
                problems.add(shown, rule, f"Write {parsed.key_or_group}='int({value})'.")
                continue
            prefix = parsed.get_key_element().removesuffix(parsed.key_or_group)
            found[parsed.key_or_group] = Parameter(parsed.key_or_group, prefix, distribution)
        values = {hydra_setup.key_of(line): line.partition("=")[2] for line in fixed}
        choices = {key: one.distribution for key, one in found.items()}
        active = conditions.read(when, choices, values, problems)
        if not found and not problems:
            rule = "the sweep searches no key"
            remedy = "Give a range, as in optimizer.lr='tag(log, interval(1e-4, 1e-1))'."
            problems.add(f"hydra/sweeper={chosen}", rule, remedy)
        problems.raise_if()
        ordered = conditions.ordered(active)
        return cls(tuple(fixed), tuple(replace(found[k], conditions=active[k]) for k in ordered))

    def sample(self, trial: Trial) -> list[str]:
        """Return the overrides of a job: the fixed ones and those that the sampler chooses."""
        chosen: dict[str, str] = {}
        for parameter in self.parameters:
            if conditions.hold(parameter.conditions, chosen):
                chosen[parameter.key] = parameter.suggest(trial)
        return self._overrides(chosen)

    def chosen(self, overrides: Sequence[str]) -> dict[str, str]:
        """Return what a sampler has chosen in the overrides of a job, by key."""
        given = {hydra_setup.key_of(o): o.partition("=")[2] for o in overrides}
        return {one.key: given[one.key] for one in self.parameters if one.key in given}

    def probes(self) -> list[list[str]]:
        """Return jobs in which each example of each key stands at least once."""
        found = [self._probe({})]
        for parameter in self.parameters:
            needed = self._needed(parameter)
            for value in parameter.examples():
                found.append(self._probe({**needed, parameter.key: value}))
        unique = dict.fromkeys(tuple(map(hydra_setup.closed, job)) for job in found)
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
            if conditions.hold(parameter.conditions, chosen):
                chosen[parameter.key] = wanted.get(parameter.key, parameter.examples()[0])
        return self._overrides(chosen)

    def _overrides(self, chosen: Mapping[str, str]) -> list[str]:
        prefixes = {one.key: one.prefix for one in self.parameters}
        swept = [f"{prefixes[key]}{key}={value}" for key, value in chosen.items()]
        return [*self.fixed, *hydra_setup.opened(swept)]


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
