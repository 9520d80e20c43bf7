"""The launcher and the sweeper of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.recipe import hydra_setup, plugin_nodes

pytestmark = pytest.mark.usefixtures("hydra_session")


@pytest.mark.parametrize(
    ("overrides", "launcher", "sweeper"),
    [
        (["seed=1,2"], "basic", "basic"),
        (["~hydra/launcher", "seed=1,2"], "basic", "basic"),
        (["hydra/launcher=joblib", "seed=range(3)", "optimizer.lr=no_number"], "joblib", "basic"),
        (["hydra/sweeper=optuna", "callbacks=[no_file]"], "basic", "optuna"),
    ],
)
def test_the_launcher_and_the_sweeper_are_known_whatever_else_is_wrong(
    overrides: list[str], launcher: str, sweeper: str
) -> None:
    found = plugin_nodes.choices(overrides, "config")
    assert found == {"launcher": launcher, "sweeper": sweeper}


@pytest.mark.parametrize("text", ["seed: [1\n", "defaults: {a: b}\n"])
def test_a_file_that_cannot_be_read_is_reported_elsewhere(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text(f"# @package _global_\n{text}")
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        found = plugin_nodes.choices(["experiment=broken", "hydra/launcher=joblib"], "config")
    assert found == {"launcher": "joblib", "sweeper": "basic"}


def test_nodes_are_those_of_files_and_of_hydras_own_overrides() -> None:
    line = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=3", "seed=1,2", "model.width=no_number"]
    found = plugin_nodes.nodes(line, "config")
    assert (found["hydra/launcher"], found["hydra.launcher"]["n_jobs"]) == ("joblib", 3)
    assert plugin_nodes.settings("launcher", line, "config")["n_jobs"] == 3
