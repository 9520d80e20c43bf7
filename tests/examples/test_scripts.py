"""E1, R1: each script of `examples/scripts/` on 1 and 2 processes: its metrics and files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import commands
from tests.examples.playing import ROOT, Metrics, last_line, metrics_of
from tests.examples.playing import SCRIPTS as FOLDER
from tests.examples.scripts import SCRIPTS, Script
from tests.tiers import one_in

SECONDS = 500.0
ROUNDING = 0.004  # of what is summed up in another order; one test sample of 360 weighs 0.003

pytestmark = pytest.mark.timeout(900)  # a second or two each; the machine may be shared
of_some = pytest.mark.parametrize("script", one_in(9, SCRIPTS, lambda script: script.name))


def agree(one: Metrics, two: Metrics, names: tuple[str, ...]) -> None:
    for name in names:
        assert two[name] == pytest.approx(one[name], abs=ROUNDING), name


@pytest.mark.slow  # those that follow run some
@pytest.mark.parametrize("script", one_in(3, SCRIPTS, lambda script: script.name, first=1))
def test_a_small_run(script: Script, tmp_path: Path) -> None:
    one, two = (metrics_of(script.name, size, script.small, tmp_path) for size in (1, 2))
    assert [script.shortcomings(metrics, small=True) for metrics in (one, two)] == [[], []]
    agree(one, two, script.alike)


def started(folder: Path, *command: str) -> Metrics:
    """Return the metrics of a script that is started as its users start it."""
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = commands.run(*command, cwd=folder, environment=environment, timeout=SECONDS)
    assert ended.returncode == 0, f"{ended.args}\n{ended.stdout}\n{ended.stderr}"
    return last_line(ended.stdout)


@pytest.mark.slow  # a small run is not
@of_some
def test_the_whole_run(script: Script, tmp_path: Path) -> None:
    path = str(FOLDER / f"{script.name}.py")
    launch = ("-m", "accel.commands", "launch", "--num_processes", "2", "--cpu")
    one = started(tmp_path / "one", path, "--cpu")
    two = started(tmp_path / "two", *launch, path)
    assert [script.shortcomings(metrics) for metrics in (one, two)] == [[], []]
    agree(one, two, tuple(set(script.alike) - set(script.drifting)))


@pytest.mark.slow  # a small run is not
@of_some
def test_the_same_seed_gives_the_same_metrics(script: Script, tmp_path: Path) -> None:
    steady = (*script.small, *script.steady)
    runs = [metrics_of(script.name, 2, steady, tmp_path) for _ in range(2)]
    other = metrics_of(script.name, 2, (*steady, "--seed", "1"), tmp_path)
    assert runs[0] == runs[1] != other


def test_all_scripts_are_here() -> None:
    assert sorted(script.name for script in SCRIPTS) == sorted(p.stem for p in FOLDER.glob("*.py"))


def test_the_readme_names_all_scripts() -> None:
    text = (FOLDER / "README.md").read_text()
    assert [script.name for script in SCRIPTS if f"`{script.name}.py`" not in text] == []


def test_tracked_values_are_what_the_script_prints(tmp_path: Path) -> None:
    metrics = metrics_of("experiment_tracking", 2, ("--epochs", "1"), tmp_path)
    (folder,) = {path.parent for path in (tmp_path / "runs" / "digits").glob("events*")}
    events = EventAccumulator(str(folder)).Reload()
    for name, value in metrics.items():
        assert [event.value for event in events.Scalars(f"test/{name}")] == [pytest.approx(value)]
    assert [event.step for event in events.Scalars("train/loss")] == [10, 20, 30, 40]


def test_local_sgd_averages_weights_as_often_as_it_is_told(tmp_path: Path) -> None:
    def trained(processes: int, steps: int) -> Metrics:
        arguments = ("--epochs", "2", "--local_sgd_steps", str(steps))
        return metrics_of("local_sgd", processes, arguments, tmp_path)

    every_step = trained(2, 1)
    agree(trained(1, 1), every_step, ("accuracy", "loss"))  # the average is that of gradients
    assert trained(2, 4)["loss"] != every_step["loss"]  # data parallelism would give the same


def test_every_process_writes_a_trace(tmp_path: Path) -> None:
    metrics_of("profiling", 2, ("--epochs", "1", "--output_dir", "traces"), tmp_path)
    for rank in range(2):
        trace = json.loads((tmp_path / "traces" / f"profile_{rank}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("aten::conv2d") == 3


@pytest.mark.slow  # as long as a small run
def test_the_batch_is_halved_where_memory_runs_out(tmp_path: Path) -> None:
    scarce, enough = ("--epochs", "1", "--memory_mb", "150"), ("--epochs", "0", "--width", "8")
    assert metrics_of("executable_batch_size", 1, scarce, tmp_path)["batch_size"] < 512
    assert metrics_of("executable_batch_size", 1, enough, tmp_path)["batch_size"] == 512


@pytest.mark.slow  # as long as a small run
def test_accumulation_keeps_the_observed_batch(tmp_path: Path) -> None:
    runs = [
        metrics_of("automatic_gradient_accumulation", size, ("--epochs", "1", *holds), tmp_path)
        for size, holds in [(1, ()), (1, ("--holds", "10")), (2, ("--holds", "20"))]
    ]
    odd = ("--epochs", "0", "--observed_batch_size", "100", "--holds", "20")
    found = metrics_of("automatic_gradient_accumulation", 1, odd, tmp_path)
    assert (found["micro_batch"], found["accumulation"]) == (10, 10)
    assert [(run["micro_batch"], run["accumulation"]) for run in runs] == [
        (128, 1),
        (8, 16),
        (16, 4),
    ]
    for run in runs[1:]:
        agree(runs[0], run, ("accuracy", "loss"))


@pytest.mark.slow  # as long as a small run
def test_the_model_is_saved_as_transformers_loads_it(tmp_path: Path) -> None:
    arguments = ("--epochs", "1", "--limit", "64", "--output_dir", "model")
    metrics_of("causal_language_model", 2, arguments, tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["architectures"], config["vocab_size"]) == (["LlamaForCausalLM"], 256)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (256, 64)


@pytest.mark.slow  # as long as a small run
def test_only_the_adapters_are_saved(tmp_path: Path) -> None:
    arguments = ("--epochs", "1", "--limit", "64", "--output_dir", "adapter")
    metrics_of("lora", 2, arguments, tmp_path)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", 8)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert weights
    assert all("lora_" in name for name in weights)
