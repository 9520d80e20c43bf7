"""E1: trl's command line, which starts trainings through the package's launcher."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel.commands import launch_config
from tests.helpers import ROOT, python
from tests.libraries.commands.config import load_config_from_file
from tests.libraries.commands.launch import launch_command_parser

# Python imports this module in every process, before the program.
SITE = """
import atexit, os, pathlib, sys
from tests.libraries import alias
alias.install()
def note():
    package = sys.modules.get("accelerate")
    if package is not None and "RANK" in os.environ:
        path = pathlib.Path(os.environ["NOTES"], os.environ["RANK"])
        path.write_text(package.__name__ + " of " + os.environ["WORLD_SIZE"])
atexit.register(note)
"""
MODEL = """
import sys
from transformers import GPT2LMHeadModel
from tests.libraries.programs import tiny
GPT2LMHeadModel(tiny.configuration()).save_pretrained(sys.argv[1])
tiny.tokenizer().save_pretrained(sys.argv[1])
"""
TRL = "from trl.cli.main import main; main()"


def test_settings_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    launch_config.write(launch_config.basic_config(), path)
    assert load_config_from_file(str(path)).to_dict() == launch_config.load(path)


def test_a_script_is_launched_with_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").touch()
    found = launch_command_parser().parse_args(
        ["--cpu", "--num_processes", "2", "a.py", "--b", "3"]
    )
    assert found.launch.command[-3:] == ["a.py", "--b", "3"]


def run(folder: Path, *arguments: str) -> str:
    """Return what a command prints with `accel` in the place of the package."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT))),
        "NOTES": str(folder),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        python("-c", *arguments),
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_trl_trains_from_its_command_line(tmp_path: Path) -> None:
    model, rows, trained = tmp_path / "model", tmp_path / "rows", tmp_path / "trained"
    run(tmp_path, MODEL, str(model))
    rows.mkdir()
    texts = [json.dumps({"text": f"w{i} w{i + 1} w{i + 2}"}) for i in range(16)]
    (rows / "train.jsonl").write_text("\n".join(texts))
    flags = {
        "num_processes": 2,
        "model_name_or_path": model,
        "dataset_name": rows,
        "output_dir": trained,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "bf16": False,
    }
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    run(tmp_path, TRL, "sft", "--cpu", "--use_cpu", *given)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["accel of 2"] * 2
    assert json.loads((trained / "checkpoint-2/trainer_state.json").read_text())["global_step"] == 2
    assert (trained / "model.safetensors").exists()
