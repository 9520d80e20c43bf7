"""C1, C3, C4: files of a project compose as Hydra composes; mistakes in them are explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.recipe import composition, hydra_setup
from tests.helpers import write_file

EXPERIMENT = "# @package _global_\ndefaults:\n  - override /model: tiny\n  - _self_\n\nname: mine\n"


def test_a_projects_own_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "conf/model/tiny.yaml", "name: cnn\nwidth: 2\n")
    write_file(tmp_path / "conf/experiment/mine.yaml", EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        found = composition.require(composition.new_run(["experiment=mine", "seed=3"], "config"))
    assert (found.name, found.model, found.seed) == ("mine", {"name": "cnn", "width": 2}, 3)


def test_a_file_that_is_shadowed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "conf/model/cnn.yaml", "name: mine\n")
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        (problem,) = composition.new_run([], "config").problems
    assert str(tmp_path / "conf/model/cnn.yaml") in problem.value
    assert "same name and is read instead" in problem.rule


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("callbacks: {x: {_target_: os.system}}", "hydra.callbacks"),
        ("job: {env_set: {LD_PRELOAD: x}}", "hydra.job.env_set"),
        ("job_logging: {root: {handlers: [x]}, handlers: {x: {(): os.system}}}", "job_logging"),
        ("sweeper: {params: {seed: '1,2'}}", "hydra.sweeper.params"),
        ("mode: MULTIRUN", "hydra.mode"),
        ("job: {chdir: true}", "hydra.job.chdir"),
        ("run: {dir: x}", "hydra.run.dir"),
    ],
)
def test_a_file_cannot_reach_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, where: str
) -> None:
    write_file(tmp_path / "conf/mine.yaml", f"defaults: [config, _self_]\nhydra: {{{text}}}\n")
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        (problem,) = composition.new_run([], "mine").problems
    assert where in problem.value
