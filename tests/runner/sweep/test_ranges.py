"""Ranges in Hydra's grammar, as Optuna's distributions."""

from __future__ import annotations

import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from accel.machine.errors import ConfigError, Problems
from runner.recipe import hydra_setup
from runner.sweep import ranges


def distribution(line: str) -> BaseDistribution:
    with hydra_setup.session():
        parsed = ranges.parsed(line, Problems())
        assert parsed is not None
        return ranges.distribution(parsed)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("interval(1,5)", FloatDistribution(1.0, 5.0)),
        ("int(interval(1,5))", IntDistribution(1, 5)),
        ("tag(log, interval(1e-4,1))", FloatDistribution(1e-4, 1.0, log=True)),
        ("tag(log, int(interval(1,64)))", IntDistribution(1, 64, log=True)),
        ("range(1,10)", IntDistribution(1, 9)),
        ("range(16,65,16)", IntDistribution(16, 64, step=16)),
        ("range(10,0,-5)", IntDistribution(5, 10, step=5)),
        ("range(0,1,0.25)", FloatDistribution(0.0, 0.75, step=0.25)),
        ("tag(log, range(1,9))", IntDistribution(1, 8, log=True)),
        ("1,2,3", CategoricalDistribution(["1", "2", "3"])),
        ("choice(a,'b c')", CategoricalDistribution(["a", "b\\ c"])),
        ("shuffle(1,2,3)", CategoricalDistribution(["1", "2", "3"])),
        ("[1,2],[3]", CategoricalDistribution(["[1,2]", "[3]"])),
    ],
)
def test_each_range_has_a_distribution(value: str, expected: BaseDistribution) -> None:
    assert distribution(f"seed={value}") == expected


def test_a_pattern_names_files_of_a_group() -> None:
    found = distribution("optimizer=glob(*)")
    assert isinstance(found, CategoricalDistribution)
    assert {"adamw", "sgd"} <= set(found.choices)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("interval(5,1)", "begins below its end"),
        ("interval(1,1)", "begins below its end"),
        ("tag(log, interval(0,1))", "begins above 0"),
        ("tag(lin, interval(0,1))", "there is no tag 'lin'"),
        ("tag(log, choice(1,2))", "has no scale"),
        ("range(5,1)", "it has no values"),
        ("tag(log, range(1,9,2))", "has the step 1"),
        ("tag(log, range(0.1,1,0.1))", "Write tag\\(log, interval"),
        ("choice(1,1)", "stands there twice"),
    ],
)
def test_a_range_without_values_is_told(value: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        distribution(f"seed={value}")


def test_what_cannot_be_read_is_told() -> None:
    problems = Problems()
    with hydra_setup.session():
        assert ranges.parsed("seed=interval(1", problems) is None
    assert "interval(a,b)" in problems[0].remedy
