"""`runner lr-find` and `batch-size-find`: what they print trains, and no run is left (C1, R10)."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from runner import cli
from tests import commands
from tests.runner.loops import losses

ROOT = Path(__file__).resolve().parents[3]
MINE = """
import torch
from runner import register

class Hungry(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, images):
        if len(images) > 4 and self.training:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return self.layer(images.flatten(1))

register.model("hungry")(Hungry)
"""


def runner(*words: str, cwd: Path, code: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = commands.run("-m", "runner", *words, cwd=cwd, environment=environment)
    assert answer.returncode == code, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


def test_what_is_no_new_run_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["lr-find", "-m", "seed=1,2"]) == 2
    assert "lr-find: it trains one new run" in capsys.readouterr().err
    assert cli.main(["batch-size-find", "--dry-run"]) == 0
    assert "nothing was started" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["distributed=multi_cpu"]], ids=["one", "two"])
def test_the_suggested_rate_of_the_digits_trains(where: list[str], tmp_path: Path) -> None:
    told = runner("lr-find", "seed=1", *where, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lr_find.png"]
    assert (tmp_path / "lr_find.png").read_bytes().startswith(b"\x89PNG")
    rows = re.findall(r"^ +([\d.e-]+) +[\d.]+ █", told, re.M)
    assert rows[0] == "1.00e-06"
    assert len(rows) > 15
    assert told.count("◀ suggestion") == 1
    (rate,) = re.findall(r"falls fastest at (optimizer.lr=[\d.e-]+)", told)
    assert 5e-4 < float(rate.partition("=")[2]) < 0.05
    words = ("trainer.epochs=4", "trainer.log_every=1", "scheduler=null", "run_dir=run")
    runner(rate, *words, *where, cwd=tmp_path)
    found = losses(tmp_path / "run")
    assert sum(found[-10:]) < 0.5 * sum(found[:10])


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    hungry = ("--import", "mine", "model={name: hungry}", "trainer.global_batch_size=6")
    told = runner("batch-size-find", *hungry, cwd=tmp_path)
    assert "8   out of memory" in told
    assert "trainer.micro_batch_size=4 trainer.global_batch_size=8" in told
    told = runner("batch-size-find", *hungry[:3], "--memory", "50MB", cwd=tmp_path, code=1)
    assert "too much" in told
    assert "No size from 1 on fits" in told
    told = runner("batch-size-find", "--start", "2048", *hungry[:2], cwd=tmp_path, code=1)
    assert "more than the training data have" in told
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] in (
        [],
        ["__pycache__"],
    )
