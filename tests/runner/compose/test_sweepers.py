"""The configuration of the runner's own sweepers."""

from __future__ import annotations

import pytest

from runner.compose import hydra_setup, sweepers


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
        found = hydra_setup.sweeper_settings(given, "config")
    assert sweepers.is_own(found)
    assert found["sampler"] == {"name": sampler}
    assert found["n_trials"] == 3
    assert set(sweepers.DEFAULTS) == {key for key in found if key[0] != "_"}
