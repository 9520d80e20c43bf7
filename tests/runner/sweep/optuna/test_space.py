"""S4: spaces of searches: ranges and conditions, from overrides and `hydra.sweeper.params`."""

from __future__ import annotations

import optuna
import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from accel.machine.errors import ConfigError
from runner.sweep.optuna.space import Condition, Space

SGD = {"optimizer.momentum": "optimizer=sgd"}
GIVEN = ("seed=3", "optimizer=adamw,sgd", "optimizer.lr=tag(log, interval(1e-4, 1e-1))")


pytestmark = pytest.mark.usefixtures("hydra_session")


def draws(space: Space, count: int = 20) -> list[dict[str, str]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    jobs = [space.sample(study.ask()) for _ in range(count)]
    return [dict(o.lstrip("+").split("=", 1) for o in job) for job in jobs]


def test_jobs_have_the_fixed_overrides_and_what_the_sampler_chooses() -> None:
    space = Space.read([*GIVEN, "optimizer.momentum=interval(0,0.9)"], {}, SGD)
    jobs = draws(space)
    assert {job["seed"] for job in jobs} == {"3"}
    assert {job["optimizer"] for job in jobs} == {"adamw", "sgd"}
    assert all(1e-4 <= float(job["optimizer.lr"]) <= 1e-1 for job in jobs)
    assert all(("optimizer.momentum" in job) == (job["optimizer"] == "sgd") for job in jobs)


def test_the_command_line_goes_before_params() -> None:
    params = {"optimizer": {"lr": "interval(0,1)"}, "trainer.max_steps": "range(1,4)", "seed": 5}
    space = Space.read(["optimizer.lr=0.5"], params, {})
    assert [one.key for one in space.parameters] == ["trainer.max_steps"]
    assert set(space.fixed.values()) == {"optimizer.lr=0.5", "seed=5"}


def test_numbers_are_written_so_that_they_are_read_as_such() -> None:
    params = {"a.lr": "range(0.1, 0.65, 0.1)", "a.n": "int(interval(1, 3))"}
    space = Space.read([], {"optimizer.lr": params["a.lr"], "seed": params["a.n"]}, {})
    jobs = draws(space)
    assert {job["optimizer.lr"] for job in jobs} <= {"0.1", "0.2", "0.3", "0.4", "0.5", "0.6"}
    assert {job["seed"] for job in jobs} == {"1", "2", "3"}


def test_probes_hold_every_choice_and_both_ends() -> None:
    space = Space.read([*GIVEN, "optimizer.momentum=interval(0,0.9)"], {}, SGD)
    found = [override for job in space.probes() for override in job]
    for expected in ("optimizer=adamw", "optimizer=sgd", "optimizer.lr=0.0001"):
        assert expected in found
    assert {"optimizer.lr=0.1", "optimizer.momentum=0.0", "optimizer.momentum=0.9"} <= set(found)
    for job in space.probes():
        assert ("optimizer=sgd" in job) == any("momentum" in one for one in job)


def test_a_group_may_be_switched_off() -> None:
    space = Space.read(["scheduler=cosine,null"], {}, {})
    assert {tuple(job) for job in space.probes()} == {("scheduler=cosine",), ("scheduler=null",)}


# -- ranges ------------------------------------------------------------------------------


def distribution(value: str) -> BaseDistribution:
    (found,) = Space.read([f"seed={value}"], {}, {}).parameters
    return found.distribution


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
    assert distribution(value) == expected


def test_a_pattern_names_files_of_a_group() -> None:
    (found,) = Space.read(["optimizer=glob(*)"], {}, {}).parameters
    assert {"adamw", "sgd"} <= set(found.examples())


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("interval(5,1)", "Optuna refuses it"),
        ("tag(log, interval(0,1))", "Optuna refuses it"),
        ("range(5,1)", "the range is empty"),
        ("tag(log, range(0.1,1,0.1))", "Optuna refuses it"),
        ("tag(log, choice(1,2))", "it has no tag 'log'"),
        ("interval(1", "it cannot be read"),
    ],
)
def test_a_range_without_values_is_refused(value: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        distribution(value)


# -- conditions --------------------------------------------------------------------------


SWEPT = (
    *("model=cnn", "optimizer=adamw,sgd", "optimizer.momentum=interval(0,0.9)"),
    *("layers=range(1,4)", "optimizer.nesterov=true,false"),
)


def read(when: dict[str, object]) -> dict[str, tuple[Condition, ...]]:
    return {one.key: one.conditions for one in Space.read(SWEPT, {}, when).parameters}


def test_conditions_are_read_nested_or_dotted() -> None:
    expected = (Condition("optimizer", ("sgd",)),)
    assert read({"optimizer.momentum": "optimizer=sgd"})["optimizer.momentum"] == expected
    assert read({"optimizer": {"momentum": "optimizer=sgd"}})["optimizer.momentum"] == expected
    both = read({"optimizer.momentum": ["optimizer=sgd", "layers=1, 2"]})["optimizer.momentum"]
    assert both == (*expected, Condition("layers", ("1", "2")))


def test_a_condition_on_a_fixed_key_holds_always_or_never() -> None:
    jobs = draws(Space.read(SWEPT, {}, {"layers": "model=cnn", "optimizer.momentum": "layers=1"}))
    assert all(("optimizer.momentum" in job) == (job["layers"] == "1") for job in jobs)
    jobs = draws(Space.read(SWEPT, {}, {"layers": "model=gpt", "optimizer.momentum": "layers=1"}))
    assert {tuple(job) for job in jobs} == {("model", "optimizer", "optimizer.nesterov")}


def test_a_key_comes_after_those_it_depends_on() -> None:
    when = {"optimizer.momentum": "optimizer.nesterov=True", "optimizer.nesterov": "layers=1"}
    order = list(read(dict(when)))
    assert order.index("layers") < order.index("optimizer.nesterov")
    assert order.index("optimizer.nesterov") < order.index("optimizer.momentum")


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ({"optimizer.momentun": "optimizer=sgd"}, "Did you mean 'optimizer.momentum'"),
        ({"layers": "optimizer=sdg"}, "Did you mean 'sgd'"),
        ({"layers": "optimizr=sgd"}, "Did you mean 'optimizer'"),
        ({"layers": "optimizer.momentum=0.5"}, "is one of no list"),
        ({"layers": "optimizer=sgd", "optimizer": "layers=1"}, "depend on each other"),
        ({"layers": "layers=1"}, "depend on each other"),
    ],
)
def test_a_wrong_condition_is_refused(when: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(when)
