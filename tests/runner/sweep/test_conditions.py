"""When a key takes part in a search."""

from __future__ import annotations

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from accel.machine.errors import ConfigError, Problems
from runner.sweep import conditions
from runner.sweep.conditions import Condition

FOUND = {
    "optimizer": CategoricalDistribution(["adamw", "sgd"]),
    "optimizer.momentum": FloatDistribution(0.0, 0.9),
    "layers": IntDistribution(1, 3),
    "optimizer.nesterov": CategoricalDistribution(["true", "false"]),
}
FIXED = {"model": "cnn"}


def read(when: object) -> dict[str, tuple[Condition, ...]]:
    problems = Problems()
    found = conditions.read(when, FOUND, FIXED, problems)
    problems.raise_if()
    return found


def test_conditions_are_read_nested_or_dotted() -> None:
    expected = (Condition("optimizer", ("sgd",)),)
    assert read({"optimizer.momentum": "optimizer=sgd"})["optimizer.momentum"] == expected
    assert read({"optimizer": {"momentum": "optimizer=sgd"}})["optimizer.momentum"] == expected
    both = read({"optimizer.momentum": ["optimizer=sgd", "layers=1, 2"]})["optimizer.momentum"]
    assert both == (*expected, Condition("layers", ("1", "2")))


def test_a_condition_on_a_fixed_key_holds_always_or_never() -> None:
    assert read({"layers": "model=cnn"})["layers"] == ()
    assert "layers" not in read({"layers": "model=gpt"})
    never = read({"layers": "model=gpt", "optimizer.momentum": "layers=1"})
    assert set(never) == {"optimizer", "optimizer.nesterov"}


def test_conditions_hold_for_what_was_chosen() -> None:
    own = (Condition("optimizer", ("sgd",)),)
    assert conditions.hold(own, {"optimizer": "sgd"})
    assert not conditions.hold(own, {"optimizer": "adamw"})
    assert not conditions.hold(own, {})
    assert conditions.hold((), {})


def test_a_key_comes_after_those_it_depends_on() -> None:
    of = read({"optimizer.momentum": "optimizer.nesterov=true", "optimizer.nesterov": "layers=1"})
    order = conditions.ordered(of)
    assert order.index("layers") < order.index("optimizer.nesterov")
    assert order.index("optimizer.nesterov") < order.index("optimizer.momentum")


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ({"optimizer.momentun": "optimizer=sgd"}, "Did you mean 'optimizer.momentum'"),
        ({"layers": "optimizr=sgd"}, "Did you mean 'optimizer'"),
        ({"layers": "optimizer=sdg"}, "Did you mean 'sgd'"),
        ({"layers": "optimizer"}, "a condition is other_key=value"),
        ({"layers": "layers=1"}, "does not depend on itself"),
        ({"layers": "optimizer.momentum=0.5"}, "has no single values"),
        ("optimizer=sgd", "maps swept keys"),
    ],
)
def test_a_mistake_is_told(when: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(when)


def test_keys_that_depend_on_each_other_are_told() -> None:
    found = read({"layers": "optimizer=sgd", "optimizer": "layers=1"})
    with pytest.raises(ConfigError, match="depend on each other"):
        conditions.ordered(found)
