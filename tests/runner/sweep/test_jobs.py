"""C3: sweeps under any launcher and sweeper train the jobs that Hydra composed (also S1, S2)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner import cli
from runner.recipe import hydra_setup
from runner.sweep import plan
from tests.helpers import ROOT, python, ran, wait_until, write_file
from tests.signals.cells import COMMAND, children
from tests.signals.oracle import Command

SHORT = ("trainer.max_steps=2", "tracker.log_with=[]", "checkpoint=none", "data.augment=false")
# Samples three learning rates of its own, in two batches, and writes down what each was worth.
SWEEPER = """
import json, os, pathlib
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

@dataclass
class Conf:
    _target_: str = "hydra_plugins.three.Three"
    second: str = "0.02"

ConfigStore.instance().store(group="hydra/sweeper", name="three", node=Conf, provider="three")

class Three(Sweeper):
    def __init__(self, second):
        self.second = second

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments):
        fixed = [a for a in arguments if "interval" not in a]
        (free,) = [a.partition("=")[0] for a in arguments if "interval" in a]
        worth = {}
        for start, batch in ((0, ["0.01", self.second]), (2, ["0.03"])):
            jobs = [[*fixed, f"{free}={value}"] for value in batch]
            for value, ended in zip(batch, self.launcher.launch(jobs, start)):
                worth[value] = ended.return_value
        pathlib.Path(os.environ["WORTH"]).write_text(json.dumps(worth))
"""
# A launcher that nobody has told the runner of.
LAUNCHER = """
from dataclasses import dataclass
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore

@dataclass
class Conf:
    _target_: str = "hydra_plugins.mine.Mine"

ConfigStore.instance().store(group="hydra/launcher", name="mine", node=Conf, provider="mine")

class Mine(BasicLauncher):
    pass
"""


def runner(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *([variables.pop("PATHS")] if "PATHS" in variables else [])])
    known = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    return ran(python("-m", "runner", *arguments), cwd, 400, **known)


def recipes(folder: Path) -> list[dict[str, Any]]:
    from omegaconf import OmegaConf

    found = [OmegaConf.load(path) for path in folder.glob("runs/*/sweep-*/*/config.yaml")]
    return [OmegaConf.to_container(recipe) for recipe in found]  # type: ignore[misc]


@pytest.mark.slow  # processes that import torch, one after the other
def test_each_job_of_another_launcher_trains_its_own_recipe(tmp_path: Path) -> None:
    ended = runner(
        *("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2", *SHORT),
        *("name=one", "scheduler=null", "optimizer.lr=1e-3,1e30"),
        "trainer.log_every=1",
        cwd=tmp_path,
    )
    found = sorted((recipe["seed"], recipe["optimizer"]["lr"]) for recipe in recipes(tmp_path))
    assert found == [(1, 1e-3), (1, 1e30), (2, 1e-3), (2, 1e30)], ended.stdout + ended.stderr
    assert {recipe["name"] for recipe in recipes(tmp_path)} == {"one"}
    environments = [
        json.loads(p.read_text())
        for p in tmp_path.glob("runs/*/sweep-*/*/sessions/*/environment.json")
    ]
    assert all("hydra/launcher=joblib" in found["command"] for found in environments)
    # A failed job is a failed exit of the whole.
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "2 of 4 jobs failed: 0001, 0003" in ended.stderr


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A folder with a plugin of the user's, as `hydra_plugins` is found on the path."""
    package = tmp_path / "plugins" / "hydra_plugins"
    write_file(package / "three.py", SWEEPER)
    write_file(package / "mine.py", LAUNCHER)
    return tmp_path / "plugins"


@pytest.mark.slow  # two processes that import torch
def test_a_sweep_goes_on_under_a_launcher_of_a_third_party(three: Path, tmp_path: Path) -> None:
    line = ("-m", "seed=1,2", *SHORT)
    ended = runner(*line, "hydra/launcher=mine", cwd=tmp_path, PATHS=str(three))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(recipe["seed"] for recipe in recipes(tmp_path)) == [1, 2]
    assert "best: job" in ended.stdout
    again = runner(*line, cwd=tmp_path)
    assert "Nothing is left to do" in again.stdout, again.stderr


@pytest.mark.slow
def test_another_sweeper_gets_the_metric_of_its_samples(three: Path, tmp_path: Path) -> None:
    worth = tmp_path / "worth.json"
    ended = runner(
        *("-m", "hydra/launcher=joblib", "hydra/sweeper=three", *SHORT),
        *("optimizer.lr=interval(0.01,0.1)", "checkpoint.monitor=accuracy", "checkpoint.mode=max"),
        cwd=tmp_path,
        PATHS=str(three),
        WORTH=str(worth),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    measured = {}
    for summary in tmp_path.glob("runs/*/sweep-*/*/summary.json"):
        rate = _recipe_of(summary)["optimizer"]["lr"]
        measured[str(rate)] = json.loads(summary.read_text())["metrics"]["validation"]["accuracy"]
    assert json.loads(worth.read_text()) == measured
    assert sorted(measured) == ["0.01", "0.02", "0.03"]


def _recipe_of(file: Path) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.load(file.parent / "config.yaml")


@pytest.mark.slow
def test_a_sample_that_is_no_recipe_is_refused_where_it_runs(three: Path, tmp_path: Path) -> None:
    ended = runner(
        *("-m", "hydra/sweeper=three", "hydra.sweeper.second=-1", *SHORT),
        "model.dropout=0",
        "trainer.clip_grad_norm=interval(0.01,0.1)",
        cwd=tmp_path,
        PATHS=str(three),
        WORTH=str(tmp_path / "worth.json"),
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "trainer.clip_grad_norm=-1" in ended.stderr
    assert not (tmp_path / "worth.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "where", [("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), ("sweep.jobs=2",)]
)
def test_a_stop_ends_the_jobs(
    tmp_path: Path, where: tuple[str, ...], number: signal.Signals
) -> None:
    command = python(
        *("-c", COMMAND, "-m", *where),
        *("seed=1,2,3", "trainer.epochs=100000", "tracker.log_with=[]"),
    )
    sweep = Command(command, tmp_path / "output", "", session=True)
    saved = "runs/*/sweep-*/*/checkpoints/checkpoint_*"

    def begun() -> bool:  # both jobs
        assert sweep.process.poll() is None, sweep.printed()
        return len({path.parents[1] for path in tmp_path.glob(saved)}) >= 2

    assert wait_until(begun, 1200)  # two minutes at a load of 14
    below = children(sweep.process.pid)
    os.kill(sweep.process.pid, number)
    assert sweep.code() == (75 if number == signal.SIGTERM else 130), sweep.printed()
    assert len(list(tmp_path.glob("runs/*/sweep-*/*/config.yaml"))) == 2  # the third never began
    if number == signal.SIGTERM:
        stopped = [
            json.loads(p.read_text()) for p in tmp_path.glob("runs/*/sweep-*/*/summary.json")
        ]
        assert [summary["stopped"] for summary in stopped] == ["signal", "signal"]
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 30)


# -- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["-m", "hydra/launcher=jobblib", "seed=1,2"], "Did you mean 'joblib'"),
        (["-m", "hydra/launcher=joblib", "sweep.jobs=2", "seed=1,2"], "Leave one of them out"),
        (["-m", "run_dir=here", "seed=1,2"], "Give sweep.dir=DIR."),
        (["sweep.jobs=2", "seed=1"], "Add -m"),
        (["-m", "sweep.list=[[seed=1],[nonsense]]"], "neither a command nor key=value"),
        (["-m", "hydra/sweeper=optuna", "seed=1"], "the sweep searches no key"),
        (["hydra/launcher=joblib", "seed=1"], "Add -m"),
        (["hydra.launcher.n_jobs=2"], "Add -m"),
        (["-m", "resume=auto", "seed=1,2"], "the same command again goes on"),
        (["-m", "hydra/sweeper=optuna", "optimizer.lr=interval(-1,1)"], "optimizer.lr=-1.0: it"),
    ],
)
def test_what_does_not_work_is_refused_by_name(
    line: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(line) == 2
    assert expected in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_file_that_resumes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(tmp_path / "conf/experiment/mine.yaml", "# @package _global_\nresume: auto\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["-m", "experiment=mine", "seed=1,2"]) == 2
    assert "resume: in a file, with --multirun: a sweep starts new runs" in capsys.readouterr().err


def test_a_list_of_jobs_is_combined_with_listed_values() -> None:
    chosen = plan.take(["sweep.list=[[optimizer.lr=0.1,seed=5],[model.width=4]]"])[0]
    with hydra_setup.session():
        choice = plan.choose(["seed=1,2"], "config", chosen)
        found = plan.lists(["seed=1,2"], choice, chosen)
    assert found == [
        ["seed=5", "optimizer.lr=0.1"],
        ["seed=1", "model.width=4"],
        ["seed=2", "model.width=4"],
    ]


def test_the_number_of_a_job_can_stand_in_its_recipe(tmp_path: Path) -> None:
    with hydra_setup.session():
        found = plan.examine([["seed=${hydra:job.num}"], ["seed=${hydra:job.num}"]], "config")
    assert [job.recipe.seed for job in found] == [0, 1]


def test_a_launcher_without_its_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    plan.require_cluster(plan.Choice("joblib", "basic"))
    with pytest.raises(ConfigError, match="there is no sbatch on this machine"):
        plan.require_cluster(plan.Choice("submitit_slurm", "basic"))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["experiment=searching,plain"], "Give hydra/sweeper=optuna and hydra.sweeper.*"),
        (["hydra/sweeper=optuna", "experiment=searching,plain"], "Give hydra.sweeper.* on"),
        (["sweep.list=[[experiment=searching],[seed=1]]"], "or sweep experiment=searching alone"),
        (["experiment=side_by_side,plain"], "Give hydra/launcher=joblib and hydra.launcher.*"),
    ],
)
def test_swept_files_choose_no_launcher_and_no_sweeper(
    line: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "conf" / "experiment"
    files = {
        "plain": "seed: 2\n",
        "searching": "defaults: [{override /hydra/sweeper: optuna}]\n"
        "hydra: {sweeper: {n_trials: 2, params: {optimizer.lr: 'interval(0.1, 1)'}}}\n",
        "side_by_side": "defaults: [{override /hydra/launcher: joblib}]\n"
        "hydra: {launcher: {n_jobs: 2}}\n",
    }
    for name, text in files.items():
        write_file(folder / f"{name}.yaml", f"# @package _global_\n{text}")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["-m", *line]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert cli.main(["-m", "experiment=plain", "seed=1,2", "--dry-run"]) == 0
