"""`runner lr-find` and `batch-size-find`: what they print trains, and no run is left (C1, R10)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import commands
from tests.runner.loops import losses

ROOT = Path(__file__).resolve().parents[3]
MINE = """
import torch
from runner import register

@register.model("hungry")
class Hungry(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, images):
        if len(images) > 4 and self.training:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().forward(images.flatten(1))
"""


def runner(*words: str, cwd: Path, code: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = commands.run("-m", "runner", *words, cwd=cwd, environment=environment)
    assert answer.returncode == code, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["distributed=multi_cpu"]], ids=["one", "two"])
def test_the_suggested_rate_of_the_digits_trains(where: list[str], tmp_path: Path) -> None:
    assert "it trains one new run" in runner("lr-find", "-m", "seed=1,2", cwd=tmp_path, code=2)
    told = runner("lr-find", "seed=1", *where, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lr_find.png"]
    assert len(re.findall(r"^ +[\d.e-]+ +[\d.]+ █", told, re.M)) > 15
    (rate,) = re.findall(r"falls fastest at (optimizer.lr=[\d.e-]+)", told)
    assert 5e-4 < float(rate.partition("=")[2]) < 0.05
    runner(rate, "trainer.epochs=4", "trainer.log_every=1", "run_dir=run", *where, cwd=tmp_path)
    found = losses(tmp_path / "run")
    assert sum(found[-10:]) < 0.5 * sum(found[:10])


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    hungry = ("--import", "mine", "model={name: hungry}", "trainer.global_batch_size=6")
    told = runner("batch-size-find", *hungry, cwd=tmp_path)
    assert "8: out of memory" in told
    assert "trainer.micro_batch_size=4 trainer.global_batch_size=8" in told
    told = runner("batch-size-find", *hungry, "--memory", "50MB", cwd=tmp_path, code=1)
    assert "too much" in told
    assert not (tmp_path / "runs").exists()
