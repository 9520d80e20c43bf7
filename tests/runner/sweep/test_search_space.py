"""Spaces of searches, from a command line and from `hydra.sweeper.params`."""

from __future__ import annotations

from collections.abc import Iterator

import optuna
import pytest

from accel.machine.errors import ConfigError
from runner.recipe import hydra_setup
from runner.sweep.search_space import Space

SGD = {"optimizer.momentum": "optimizer=sgd"}
GIVEN = ("seed=3", "optimizer=adamw,sgd", "optimizer.lr=tag(log, interval(1e-4, 1e-1))")


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with hydra_setup.session():
        yield


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
    assert set(map(hydra_setup.closed, space.fixed)) == {"optimizer.lr=0.5", "seed=5"}


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


@pytest.mark.parametrize(
    ("overrides", "params", "message"),
    [
        (["seed=1"], {}, "searches no key"),
        (["seed=interval(1,9)"], {}, r"Write seed='int\(interval\(1,9\)\)'"),
        (["optimizer.lr=interval(1,0)", "seed=tag(log, choice(1,2))"], {}, "scale"),
        ([], {"optimizer": ["adamw", "sgd"]}, r"choice\(adamw, sgd\)"),
        ([], "optimizer", "maps keys of the recipe"),
    ],
)
def test_mistakes_are_told(overrides: list[str], params: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Space.read(overrides, params, {})
