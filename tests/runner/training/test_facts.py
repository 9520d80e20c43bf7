"""Late values: what the data tells is filled in before anything is built, and recorded (C2, R1)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

from accel.machine.errors import ConfigError
from runner import Data
from runner.recipe import composition, facts, hydra_setup, serialization
from runner.recipe.schema import Recipe
from runner.runs.job import Job
from runner.training import build, factory_results
from tests import commands

ROOT = Path(__file__).resolve().parents[3]
PROJECT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from runner import Data, register

@register.model("wide")
def wide(num_classes: int) -> nn.Module:
    return nn.Linear(2, num_classes)

@register.data("points")
def points(kinds: int = 3) -> Data:
    inputs = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(inputs, torch.arange(100) % kinds)
    return Data(samples, samples, facts={"num_classes": torch.tensor(kinds)})
"""
FACTS = ("model.num_classes=${facts:num_classes}", "scheduler.warmup=${facts:steps_per_epoch}")
NUMBERS = ("model.num_classes=3", "scheduler.warmup=2")
POINTS = ("model={name: wide}", "data={name: points}", "trainer.epochs=2", "tracker.log_with=[]")
TWO = ("distributed=multi_cpu", "distributed.num_processes=2")


def composed(*overrides: str) -> composition.Examined:
    with hydra_setup.session():
        return composition.new_run(overrides, "config")


def of_data(recipe: Recipe, told: dict[str, object]) -> Recipe:
    samples = TensorDataset(torch.zeros(100, 2))
    return build.with_facts(recipe, Data(samples, facts=told))[0]


def test_words_stay_until_the_data_is_there() -> None:
    late = composed("optimizer.lr=${facts:rate}", "scheduler.warmup=a${facts:total_steps}")
    recipe = composition.require(late)
    assert recipe.optimizer["lr"] == "${facts:rate}"
    plain = serialization.frozen_plain(recipe)
    read = serialization.parse_yaml(serialization.yaml_text(plain), Path())
    assert {key: read[key] for key in plain} == plain
    found = of_data(recipe, {"rate": np.float64(0.5)})
    assert (found.optimizer["lr"], found.scheduler["warmup"]) == (0.5, "a40")
    assert facts.recorded(plain, serialization.frozen_plain(found))["optimizer"]["lr"] == 0.5


def test_a_recorded_number_is_no_difference() -> None:
    there, here = {"a": [{"b": 3}]}, {"a": [{"b": "${facts:n}"}]}
    assert facts.recorded(here, there) == there
    assert facts.recorded(here, {"a": []}) == here
    assert serialization.differences({"b": 3, "c": 1}, {"b": "${facts:n}", "c": 2}) == [("c", 1, 2)]


def test_a_missing_fact_is_told_with_the_nearest() -> None:
    recipe = composition.require(composed("optimizer.lr=${facts:num_clases}"))
    with pytest.raises(ConfigError, match=r"the data tells no fact of that name.*'num_classes'"):
        of_data(recipe, {"num_classes": 3})


@pytest.mark.parametrize("override", ["name", "trainer.log_every", "data.split_seed"])
def test_only_what_is_built_after_the_data_waits_for_it(override: str) -> None:
    (problem,) = composed(f"{override}=${{facts:n}}").problems
    assert serialization.NOT_LATE in str(problem)


def test_facts_are_values_of_yaml() -> None:
    wrong = Data(TensorDataset(torch.zeros(2)), facts={"model": object()})
    with pytest.raises(ConfigError, match=r"facts\['model'\].*YAML holds it"):
        factory_results.check("data", "points", wrong)


def run(*overrides: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    (cwd / "points.py").write_text(PROJECT)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{cwd}"}
    arguments = ("-m", "runner", "--import", "points", *overrides)
    answer = commands.run(*arguments, cwd=cwd, environment=environment)
    assert answer.returncode == code, answer.stdout + answer.stderr
    return answer


def weights(run_dir: Path) -> bytes:
    return max(run_dir.glob("checkpoints/*/model.safetensors")).read_bytes()


def values(run_dir: Path) -> tuple[object, object]:
    found = yaml.safe_load((run_dir / "config.yaml").read_text())
    return found["model"]["num_classes"], found["scheduler"]["warmup"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), TWO], ids=["one", "two"])
def test_a_run_with_facts_is_that_with_the_numbers(more: tuple[str, ...], tmp_path: Path) -> None:
    """Also one that is stopped, resumed and made again; and as jobs of a sweep."""
    runs = {name: tmp_path / name for name in ("late", "plain", "other")}
    run(*POINTS, *FACTS, *more, f"run_dir={runs['late']}", "trainer.stop_after=1", cwd=tmp_path)
    run(f"resume={runs['late']}", cwd=tmp_path)
    run(*POINTS, *NUMBERS, *more, f"run_dir={runs['plain']}", cwd=tmp_path)
    assert weights(runs["late"]) == weights(runs["plain"])
    for session in (runs["late"], *(runs["late"] / "sessions").iterdir()):
        assert values(session) == (3, 2)
    assert Job.read(runs["late"])[1]["model"] == Job.read(runs["plain"])[1]["model"]
    again = run("again", str(runs["late"]), f"run_dir={runs['other']}", cwd=tmp_path)
    assert "bit-equal" in again.stdout
    same = (*POINTS, *FACTS, *more, f"run_dir={runs['late']}", "resume=auto")
    assert "Nothing is left to do" in run(*same, cwd=tmp_path).stdout


@pytest.mark.slow
def test_jobs_of_a_sweep_and_other_data(tmp_path: Path) -> None:
    sweep = (*POINTS, *FACTS, "-m", "data.kinds=2,4", "sweep.dir=jobs")
    run(*sweep, cwd=tmp_path)
    assert [values(tmp_path / "jobs" / job)[0] for job in ("0000", "0001")] == [2, 4]
    assert "Nothing is left to do" in run(*sweep, cwd=tmp_path).stdout
    resumed = ("resume=jobs/0001", "data.kinds=2", "trainer.epochs=3")
    told = "The data tells num_classes=2; the recipe was made with 4."
    assert told in run(*resumed, cwd=tmp_path).stdout
    wrong = (*POINTS, "model.num_classes=${facts:num_clases}", "run_dir=wrong")
    assert "Did you mean 'num_classes'?" in run(*wrong, cwd=tmp_path, code=2).stderr
    assert not (tmp_path / "wrong").exists()
