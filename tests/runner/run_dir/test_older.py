"""A run directory of an earlier version is resumed, and ends with the weights it would have had.

`older/` was written at commit ea4c8a6 by ``runner model.width=2 trainer.max_steps=6
trainer.stop_after=3 trainer.eval_every=3 'tracker.log_with=[]'``; `older_at_the_end.safetensors`
holds the weights of the same run without `stop_after`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import commands

OLDER = Path(__file__).parent / "older"
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow  # it trains in a process of its own
def test_a_run_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    name = Path(json.loads((OLDER / "job.json").read_text())["run_dir"]).name
    run_dir = shutil.copytree(OLDER, tmp_path / name)
    command = ("-m", "runner", f"resume={run_dir}", "trainer.stop_after=null")
    answer = commands.run(*command, cwd=ROOT, environment=os.environ)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["stopped"], summary["step"]) == ("max_steps", 6)
    ended = load_file(run_dir / "checkpoints" / summary["best"]["checkpoint"] / "model.safetensors")
    expected = load_file(OLDER.parent / "older_at_the_end.safetensors")
    assert ended.keys() == expected.keys()
    for key, value in ended.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4)
