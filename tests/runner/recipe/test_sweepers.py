"""The configuration of the runner's own sweepers."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.recipe import composition, hydra_setup, plugin_nodes, sweepers


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("hydra.sweeper.sampler=random", "++hydra.sweeper.sampler.name=random"),
        ("hydra.sweeper.sampler.sigma0=0.1", "++hydra.sweeper.sampler.sigma0=0.1"),
        ("hydra.sweeper.pruner={name: median}", "++hydra.sweeper.pruner={name: median}"),
        ("hydra.sweeper.params.a.b=1", "++hydra.sweeper.params.a.b=1"),
        ("hydra.sweeper.n_trials=3", "hydra.sweeper.n_trials=3"),
        ("optimizer.lr=1", "++optimizer.lr=1"),
    ],
)
def test_open_mappings_take_any_key(override: str, expected: str) -> None:
    with hydra_setup.session():
        assert hydra_setup.opened([override]) == [expected]


@pytest.mark.parametrize(("name", "sampler"), [("optuna", "tpe"), ("random", "random")])
def test_hydra_knows_them(name: str, sampler: str) -> None:
    given = [f"hydra/sweeper={name}", "hydra.sweeper.n_trials=3", "seed=1,2"]
    with hydra_setup.session():
        found = plugin_nodes.settings("sweeper", given, "config")
    assert sweepers.is_own(found)
    assert found["sampler"] == {"name": sampler}
    assert found["n_trials"] == 3
    assert set(sweepers.DEFAULTS) == {key for key in found if key[0] != "_"}


RANGES = """\
# @package _global_
{defaults}
hydra:
  sweeper:
    params:
      optimizer.lr: interval(0, 1)
"""
OVERRIDE = "defaults:\n  - override /hydra/sweeper: optuna"


@pytest.mark.parametrize(("defaults", "allowed"), [(OVERRIDE, True), ("", False)])
def test_a_file_gives_ranges_where_it_chooses_the_search(
    defaults: str, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(RANGES.format(defaults=defaults))
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        found = composition.new_run(["experiment=mine"], "config")
        if allowed:
            given = plugin_nodes.settings("sweeper", ["experiment=mine"], "config")
            assert given["params"] == {"optimizer.lr": "interval(0, 1)"}
    assert (found.problems == []) == allowed
    if not allowed:
        assert "- override /hydra/sweeper: optuna" in found.problems[0].remedy
