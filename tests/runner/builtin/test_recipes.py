"""The built-in recipes and the example project, as whole commands but short (C2)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import commands
from tests.helpers import ROOT, with_path


def run(cwd: Path, *overrides: str) -> tuple[str, Path]:
    """Run `python -m runner` in `cwd`; return what it printed and the run's directory."""
    line = ("-m", "runner", "distributed.num_threads=1", *overrides)
    answer = commands.run(*line, cwd=cwd, environment=with_path(OMP_NUM_THREADS="1"))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (folder,) = (cwd / "runs").glob("*/*/")
    return answer.stdout, folder


def last(run_dir: Path, split: str) -> dict[str, Any]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in lines if entry["split"] == split][-1]


# In a process of its own: a project's package registers its factories there.
USED = """
import sys
import runner
from runner import cli
run_dir, output = sys.argv[1:]
assert cli.main(["eval", run_dir]) == 0
assert cli.main(["predict", run_dir, "--output", output]) == 0
model, recipe = runner.load(run_dir)
print("loaded", recipe.name, *([type(model).__name__] if not isinstance(model, dict) else model))
"""


def used(run_dir: Path, cwd: Path) -> tuple[str, list[dict[str, Any]]]:
    """Evaluate, predict with and load a run; return what was printed, and the predictions."""
    output = cwd / "predictions.jsonl"
    arguments = ("-c", USED, str(run_dir), str(output))
    answer = commands.run(*arguments, cwd=cwd, environment=with_path(OMP_NUM_THREADS="1"))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout, [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.slow  # `tests/examples` trains one, too
def test_the_example_trains_from_its_own_directory(tmp_path: Path) -> None:
    project = tmp_path / "anywhere"
    shutil.copytree(ROOT / "examples" / "wine", project, ignore=shutil.ignore_patterns("runs"))
    _, run_dir = run(project, "experiment=wine", "tracker.log_with=[]")
    assert last(run_dir, "test")["accuracy"] >= 0.9
    assert last(run_dir, "validation")["worst_recall"] >= 0.8
    printed, rows = used(run_dir, project)
    assert f"{last(run_dir, 'test')['accuracy']:.4f}" in printed
    assert "loaded wine Sequential" in printed
    assert len(rows) == 36
    assert all(len(row["prediction"]) == 3 for row in rows)  # the logits


@pytest.mark.slow  # it trains a recipe
def test_the_text_recipe_shows_a_sample(tmp_path: Path) -> None:
    small = "model.dim=16 model.num_layers=1 callbacks.text_sample.num_bytes=20 tracker.log_with=[]"
    short = "trainer.max_steps=20 trainer.global_batch_size=16 trainer.limit_eval_batches=2"
    line = f"experiment=bytes_gpt {small} {short}"
    printed, run_dir = run(tmp_path, *line.split())
    assert last(run_dir, "validation")["bits_per_byte"] < 8.0
    assert "text by the model" in printed
    printed, rows = used(run_dir, tmp_path)
    assert "bits_per_byte" in printed
    assert "loaded bytes_gpt ByteGPT" in printed
    assert len(rows[0]["next_byte"]) == 128  # of the validation data: there is no test text


@pytest.mark.slow  # `test_gan.py` trains it in this process
def test_the_gan_draws_nearer_to_the_digits(tmp_path: Path) -> None:
    line = "experiment=gan trainer.epochs=6 trainer.eval_every=20 tracker.log_with=[]"
    _, run_dir = run(tmp_path, *line.split())
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    distances = [entry["frechet"] for entry in lines if entry["split"] == "validation"]
    assert distances[-1] < 0.8 * distances[0]
    printed, rows = used(run_dir, tmp_path)
    assert "frechet" in printed
    assert "loaded gan generator discriminator" in printed
    assert len(rows) == 360


@pytest.mark.slow
def test_the_default_recipe_reaches_its_accuracy(tmp_path: Path) -> None:
    accuracies = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        _, run_dir = run(folder, f"seed={seed}", "tracker.log_with=[]")
        accuracies.append(last(run_dir, "test")["accuracy"])
    printed, rows = used(run_dir, folder)
    assert f"{accuracies[-1]:.4f}" in printed
    assert "loaded digits CNN" in printed
    assert set(rows[0]) == {"index", "prediction", "probabilities"}
    assert sorted(accuracies)[1] >= 0.98


BNB = "_target_: bitsandbytes.optim.AdamW8bit\nlr: 5e-3\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["precision=bf16_weights", "optimizer.stochastic_rounding=true"],
        ["optimizer.state_format=8bit"],
        ["optimizer=bnb"],
    ],
)
def test_low_memory_runs_of_two_processes_resume_with_the_same_bits(
    overrides: list[str], tmp_path: Path
) -> None:
    for package in ("torchao", "bitsandbytes"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    several = ("distributed=multi_cpu", "distributed.num_processes=2")
    common = (*several, "trainer.max_steps=8", "checkpoint.every_epochs=null", "tracker=none")
    states = []
    for name, limits in (("whole", ()), ("parts", ("trainer.stop_after=4",))):
        folder = tmp_path / name
        (folder / "conf" / "optimizer").mkdir(parents=True)
        (folder / "conf" / "optimizer" / "bnb.yaml").write_text(BNB)
        _, run_dir = run(folder, *common, *overrides, *limits)
        if limits:
            run(folder, f"resume={run_dir}", "trainer.stop_after=null")
        newest = sorted((run_dir / "checkpoints").glob("checkpoint_*"))[-1]
        states.append((newest / "model.safetensors").read_bytes())
    assert states[0] == states[1]
