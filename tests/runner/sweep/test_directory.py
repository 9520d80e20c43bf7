"""The directory of a sweep: found again, described, compared (S1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import serialization
from runner.recipe.schema import Recipe
from runner.sweep import directory
from runner.sweep.directory import Description
from tests.runner.trained_runs import make_run


def described(*seeds: int, digest: str = "abcd1234", **changed: object) -> Description:
    """Return the description of a sweep over seeds."""
    plain = [
        serialization.frozen_plain(replace(Recipe(), seed=seed, **changed))  # type: ignore[arg-type]
        for seed in seeds
    ]
    jobs = [
        directory.known_job(number, (f"seed={seed}",), recipe, plain[0])
        for number, (seed, recipe) in enumerate(zip(seeds, plain, strict=True))
    ]
    return Description(
        ["runner"],
        ".",
        "config",
        ["seed=…"],
        "basic",
        "basic",
        digest,
        "1",
        "s",
        0.0,
        plain[0],
        jobs,
    )


@pytest.fixture
def made(tmp_path: Path) -> directory.Sweep:
    recipe = Recipe(output_dir=str(tmp_path / "runs"))
    return directory.create(None, recipe, described(3, 4))


def test_the_digest_ignores_where_and_how_many_jobs_run() -> None:
    digest = directory.digest_of("config", ["seed=1,2", "optimizer.lr=0.1"])
    where = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "sweep.jobs=4", "sweep.dir=x"]
    assert directory.digest_of("config", ["optimizer.lr=0.1", *where, "seed=1,2"]) == digest
    for other in (
        ["seed=1,3", "optimizer.lr=0.1"],
        ["seed=1,2", "optimizer.lr=0.1", "sweep.list=a"],
    ):
        assert directory.digest_of("config", other) != digest
    assert directory.digest_of("other", ["seed=1,2", "optimizer.lr=0.1"]) != digest


def test_a_sweep_is_read_as_it_was_written(made: directory.Sweep, tmp_path: Path) -> None:
    assert made.path.parent == tmp_path / "runs" / "run"
    assert made.path.name.startswith("sweep-")
    assert made.path.name.endswith("-abcd1234")
    again = directory.read(made.path)
    assert again == made
    recipes = [again.recipe(number) for number in (0, 1, 2)]
    assert [recipe and recipe.seed for recipe in recipes] == [3, 4, None]
    assert recipes[1] == replace(Recipe(), seed=4)
    assert made.run_dir(7).name == "0007"


def test_the_same_command_finds_it_and_another_does_not(
    made: directory.Sweep, tmp_path: Path
) -> None:
    assert directory.find(str(tmp_path / "runs"), "run", "abcd1234") == made.path
    assert directory.find(str(tmp_path / "runs"), "run", "ffffffff") is None
    recipe = Recipe(output_dir=str(tmp_path / "runs"))
    assert directory.create(None, recipe, described(3, 4)) == made  # a command just before


def test_a_chosen_directory(tmp_path: Path) -> None:
    place = str(tmp_path / "mine")
    assert directory.place_of(place, Recipe(), "abcd1234") is None
    made = directory.create(place, Recipe(), described(3))
    assert made.path == tmp_path / "mine"
    assert directory.place_of(place, Recipe(), "abcd1234") == made.path
    with pytest.raises(ConfigError, match="holds another sweep"):
        directory.place_of(place, Recipe(), "ffffffff")
    (tmp_path / "empty").mkdir()
    assert directory.create(str(tmp_path / "empty"), Recipe(), described(3)).path.name == "empty"
    run_dir = make_run(tmp_path / "runs", checkpoints=0)
    with pytest.raises(ConfigError, match="holds a run"):
        directory.place_of(str(run_dir), Recipe(), "abcd1234")


def test_a_changed_recipe_is_refused_with_the_difference(made: directory.Sweep) -> None:
    directory.require_unchanged(made, described(3, 4))
    with pytest.raises(ConfigError) as raised:
        directory.require_unchanged(made, described(3, 4, deterministic=True))
    text = str(raised.value)
    assert "deterministic=True in jobs 0, 1: deterministic=False in" in text
    assert "Undo the change" in text
    sampled = directory.Sweep(made.path, replace(made.description, jobs=[]))
    with pytest.raises(ConfigError, match="name=other"):
        directory.require_unchanged(sampled, replace(described(3, name="other"), jobs=[]))


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ((3, 5), ["seed=5 in job 1: seed=4 in {}"]),
        ((5, 5), ["seed=5 in job 0: seed=3 in {}", "seed=5 in job 1: seed=4 in {}"]),
        (
            (3, 4, 5),
            ["has 2 jobs, and this command has 3", "job 2 (seed=5): {} has no such job"],
        ),
        ((3,), ["has 2 jobs, and this command has 1", "no job 1: {} has job 1 (seed=4)"]),
    ],
)
def test_an_edited_list_of_jobs_is_refused_with_the_difference(
    made: directory.Sweep, seeds: tuple[int, ...], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        directory.require_unchanged(made, described(*seeds))
    text = str(raised.value)
    for one in expected:
        assert one.format(made.path) in text
    assert "Undo the change, or begin a new sweep" in text


def test_changed_settings_of_a_search_are_refused_with_the_difference(
    made: directory.Sweep,
) -> None:
    there = replace(made.description, jobs=[], search={"seed": 0, "params": {"seed": "1,2"}})
    sampled = directory.Sweep(made.path, there)
    here = replace(there, search={"seed": 1, "params": {"seed": "1,2"}})
    with pytest.raises(ConfigError, match=r"hydra.sweeper.seed=1: hydra.sweeper.seed=0 in"):
        directory.require_unchanged(sampled, here)
    directory.require_unchanged(sampled, there)
    older = directory.Sweep(made.path, replace(there, search={}))
    directory.require_unchanged(older, here)


def test_a_damaged_or_missing_description(made: directory.Sweep, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds a sweep\.json"):
        directory.read(tmp_path)
    (made.path / "sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match="it is damaged"):
        directory.read(made.path)
