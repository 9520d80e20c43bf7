"""Ranges of swept keys: from Hydra's grammar to Optuna's distributions. Free of torch."""

from __future__ import annotations

import math
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

from accel.machine.errors import ConfigError, Problems
from runner.recipe import hydra_setup

LOG = "log"


def parsed(line: str, problems: Problems) -> Override | None:
    """Return an override as Hydra reads it; None, and a problem, where it cannot."""
    try:
        return hydra_setup.parse([line])[0]
    except HydraException as error:
        rule = f"it cannot be read: {str(error).splitlines()[0]}"
        remedy = "Ranges are interval(a,b), range(a,b,step), choice(a,b), tag(log, interval(a,b))."
        problems.add(hydra_setup.closed(line), rule, remedy)
        return None


def distribution(found: Override) -> BaseDistribution:
    """Return the values of a swept key; a ConfigError if there are none."""
    sweep: Any = found.value()
    line = hydra_setup.closed(str(found.input_line))
    tags = sweep.tags if isinstance(sweep, Sweep) else set()
    for tag in sorted(tags - {LOG}):
        raise ConfigError.of(line, f"there is no tag {tag!r}", "The one tag is log.")
    if isinstance(sweep, IntervalSweep):
        return _interval(line, sweep, LOG in tags)
    if isinstance(sweep, RangeSweep):
        return _range(line, sweep, LOG in tags)
    if tags:
        remedy = "Tag an interval, as in tag(log, interval(1e-4, 1e-1))."
        raise ConfigError.of(line, "a list of values has no scale", remedy)
    return _choices(found, line, sweep)


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


def _interval(line: str, sweep: IntervalSweep, log: bool) -> BaseDistribution:
    low, high = sweep.start, sweep.end
    assert low is not None
    assert high is not None
    if not low < high:
        raise ConfigError.of(line, "an interval begins below its end", "Swap or change the ends.")
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError.of(line, "its ends are finite", "Give numbers.")
    if log and low <= 0:
        rule = "a logarithmic scale begins above 0"
        raise ConfigError.of(line, rule, "Leave out tag(log, …), or begin higher.")
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)


def _range(line: str, sweep: RangeSweep, log: bool) -> BaseDistribution:
    start, stop, step = (Decimal(str(value)) for value in (sweep.start, sweep.stop, sweep.step))
    count = math.ceil((stop - start) / step) if step else 0
    if count <= 0:
        raise ConfigError.of(line, "it has no values", "A range ends before its second number.")
    low, high = sorted((start, start + (count - 1) * step))
    whole = all(isinstance(value, int) for value in (sweep.start, sweep.stop, sweep.step))
    if not whole and log:
        rule = "a range of fractions has no logarithmic scale"
        raise ConfigError.of(line, rule, "Write tag(log, interval(a,b)).")
    if not whole:
        return FloatDistribution(float(low), float(high), step=float(abs(step)))
    if log and (low <= 0 or abs(step) != 1):
        rule = "a logarithmic range begins above 0 and has the step 1"
        raise ConfigError.of(line, rule, "Leave out tag(log, …), or change it.")
    return IntDistribution(int(low), int(high), log=log, step=int(abs(step)))
