"""The directory of a sweep: found again, described, compared (S1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import hydra_setup, serialization
from runner.recipe.schema import Recipe
from runner.sweep import plan
from runner.sweep import sweep as sweeps
from runner.sweep.sweep import Description
from tests.helpers import write_file
from tests.runner.trained_runs import make_run


def described(*seeds: int, digest: str = "abcd1234", **changed: object) -> Description:
    """Return the description of a sweep over seeds."""
    plain = [
        serialization.frozen_plain(replace(Recipe(), seed=seed, **changed))  # type: ignore[arg-type]
        for seed in seeds
    ]
    jobs = [
        sweeps.known_job((f"seed={seed}",), recipe, plain[0])
        for seed, recipe in zip(seeds, plain, strict=True)
    ]
    return Description(["runner"], "config", ["seed=…"], digest, "s", 0.0, plain[0], jobs)


@pytest.fixture
def made(tmp_path: Path) -> sweeps.Sweep:
    recipe = Recipe(output_dir=str(tmp_path / "runs"))
    return sweeps.create(None, recipe, described(3, 4))


def test_the_digest_ignores_where_and_how_many_jobs_run() -> None:
    digest = plan.digest_of("config", ["seed=1,2", "optimizer.lr=0.1"])
    where = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "sweep.jobs=4", "sweep.dir=x"]
    assert plan.digest_of("config", ["seed=1,2", *where, "optimizer.lr=0.1"]) == digest
    for other in (
        ["seed=1,3", "optimizer.lr=0.1"],
        ["seed=1,2", "optimizer.lr=0.1", "sweep.list=a"],
    ):
        assert plan.digest_of("config", other) != digest
    assert plan.digest_of("other", ["seed=1,2", "optimizer.lr=0.1"]) != digest


def test_a_sweep_is_read_as_it_was_written(made: sweeps.Sweep, tmp_path: Path) -> None:
    assert made.path.parent == tmp_path / "runs" / "run"
    assert made.path.name.startswith("sweep-")
    assert made.path.name.endswith("-abcd1234")
    again = sweeps.read(made.path)
    assert again == made
    assert [again.recipe(number).seed for number in (0, 1)] == [3, 4]
    assert again.recipe(1) == replace(Recipe(), seed=4)
    assert made.run_dir(7).name == "0007"


def test_keys_that_json_does_not_know_are_kept(tmp_path: Path) -> None:
    model = {"name": "mine", "weights": {0: 1.0, 1: {True: [2]}}}
    made = sweeps.create(str(tmp_path / "s"), Recipe(), described(3, model=model))
    assert made.recipe(0).model == model
    sweeps.require_unchanged(made, described(3, model=model))


def test_the_same_command_finds_it_and_another_does_not(made: sweeps.Sweep, tmp_path: Path) -> None:
    recipe = Recipe(output_dir=str(tmp_path / "runs"))
    assert sweeps.find(None, recipe, "abcd1234") == made
    assert sweeps.find(None, recipe, "ffffffff") is None
    assert sweeps.find(None, replace(recipe, name="other"), "abcd1234") is None
    assert sweeps.create(None, recipe, described(3, 4)) == made  # a command just before


def test_a_chosen_directory(tmp_path: Path) -> None:
    place = str(tmp_path / "mine")
    assert sweeps.find(place, Recipe(), "abcd1234") is None
    made = sweeps.create(place, Recipe(), described(3))
    assert made.path == tmp_path / "mine"
    assert sweeps.find(place, Recipe(), "abcd1234") == made
    with pytest.raises(ConfigError, match="holds another sweep"):
        sweeps.find(place, Recipe(), "ffffffff")
    (tmp_path / "empty").mkdir()
    assert sweeps.create(str(tmp_path / "empty"), Recipe(), described(3)).path.name == "empty"
    run_dir = make_run(tmp_path / "runs", checkpoints=0)
    with pytest.raises(ConfigError, match="holds a run"):
        sweeps.find(str(run_dir), Recipe(), "abcd1234")


def test_a_changed_recipe_is_refused_with_the_difference(made: sweeps.Sweep) -> None:
    sweeps.require_unchanged(made, described(3, 4))
    with pytest.raises(ConfigError) as raised:
        sweeps.require_unchanged(made, described(3, 4, deterministic=True))
    text = str(raised.value)
    assert "deterministic=True in jobs 0, 1: " in text
    assert "Undo the change" in text
    sampled = sweeps.Sweep(made.path, replace(made.description, jobs=[]))
    with pytest.raises(ConfigError, match="name=other"):
        sweeps.require_unchanged(sampled, replace(described(3, name="other"), jobs=[]))


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ((3, 5), ["job 1 (seed=5): {} has job 1 (seed=4)"]),
        ((3, 4, 5), ["job 2 (seed=5): {} has no job 2"]),
        ((3,), ["no job 1: {} has job 1 (seed=4)"]),
    ],
)
def test_an_edited_list_of_jobs_is_refused_with_the_difference(
    made: sweeps.Sweep, seeds: tuple[int, ...], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        sweeps.require_unchanged(made, described(*seeds))
    text = str(raised.value)
    for one in expected:
        assert one.format(made.path) in text
    assert "Undo the change, or begin a new sweep" in text


def test_changed_settings_of_a_search_are_refused_with_the_difference(made: sweeps.Sweep) -> None:
    there = replace(made.description, jobs=[], search={"seed": 0, "params": {"seed": "1,2"}})
    sampled = sweeps.Sweep(made.path, there)
    here = replace(there, search={"seed": 1, "params": {"seed": "1,2"}})
    with pytest.raises(ConfigError, match=r"hydra.sweeper.seed=1: .* has hydra.sweeper.seed=0"):
        sweeps.require_unchanged(sampled, here)
    sweeps.require_unchanged(sampled, there)


def test_a_damaged_or_missing_description(made: sweeps.Sweep, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds a sweep\.json"):
        sweeps.read(tmp_path)
    (made.path / "sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match="it is damaged"):
        sweeps.read(made.path)


# -- what recipes are composed from ------------------------------------------------------


def sources(*overrides: str) -> str | None:
    with hydra_setup.session(overrides):
        return sweeps.sources(overrides)


@pytest.mark.usefixtures("elsewhere")
def test_sources_are_every_file_of_recipes(tmp_path: Path) -> None:
    shipped = sources()
    assert shipped is not None
    file = write_file(tmp_path / "conf" / "model" / "mine.yaml", "width: 4\n")
    first = sources()
    file.write_text("width: 5\n")
    second = sources()
    file.rename(file.with_name("other.yaml"))
    third = sources()
    assert None not in (first, second, third)
    assert len({shipped, first, second, third}) == 4
    file.with_name("notes.txt").write_text("no recipe")
    assert sources() == third


@pytest.mark.usefixtures("elsewhere")
def test_a_folder_of_the_command_line_is_one_of_them(tmp_path: Path) -> None:
    file = write_file(tmp_path / "others" / "experiment" / "own.yaml", "seed: 4\n")
    searched = f"hydra.searchpath=['file://{tmp_path / 'others'}']"
    first = sources(searched)
    assert None is not first != sources()
    file.write_text("seed: 5\n")
    assert None is not sources(searched) != first


@pytest.mark.usefixtures("elsewhere")
def test_values_from_elsewhere_have_no_digest(tmp_path: Path) -> None:
    file = write_file(tmp_path / "conf" / "mine.yaml", "name: ${model.width}\n")
    assert sources() is not None
    file.write_text("name: ${oc.decode:${oc.env:WIDTH}}\n")
    assert sources() is None
    assert sources("name=${oc.env:WIDTH}") is None
