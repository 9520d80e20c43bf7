"""What text models are shown beside: baselines and samples (R8)."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner.builtin.bytes_gpt import NextByte, byte_gpt, stdlib_bytes
from runner.builtin.text_callbacks import TextBaselines, TextSample, printable
from runner.data.datasets import Data
from runner.training.console import Display
from tests.runner.loops import build, recipe_of


@pytest.fixture
def text(tmp_path: Path) -> Data:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abcdef":
        (folder / f"{name}.py").write_text(f"def {name}(x):\n    return x + {name!r}\n" * 20)
    return stdlib_bytes(context=16, validation_bytes=1000, path=str(folder))


def text_run(run_dir: Path, text: Data, **options: Any) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    loop = build(
        run_dir,
        recipe_of(trainer__max_steps=4),
        data=text,
        objective=NextByte(),
        model=byte_gpt(dim=16, num_layers=1, num_heads=2),
        display=Display(console=Console(file=out, width=200)),
        **options,
    )
    return loop.run(), out.getvalue()


def test_baselines_stand_beside_the_model(tmp_path: Path, text: Data) -> None:
    summary, shown = text_run(tmp_path / "run", text, callbacks={"baselines": TextBaselines()})
    baselines = summary["baselines"]
    assert 0 < baselines["gzip"] < baselines["bigram"] < 8
    (line,) = [line for line in shown.splitlines() if "model " in line and "bigram" in line]
    assert f"bigram {baselines['bigram']:.4f}" in line
    assert f"gzip {baselines['gzip']:.4f}" in line
    assert f"model {summary['best']['value']:.4f}" in line
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["baselines"] == baselines


def test_a_sample_is_written_at_the_end(tmp_path: Path, text: Data) -> None:
    sample = TextSample(prompt="def f", num_bytes=12)
    summary, shown = text_run(tmp_path / "run", text, callbacks={"sample": sample})
    assert len(summary["sample"]) <= 12
    assert "text by the model, after 'def f'" in shown
    again, _ = text_run(tmp_path / "again", text, callbacks={"sample": sample})
    assert again["sample"] == summary["sample"]


def test_what_a_model_writes_does_not_steer_the_terminal() -> None:
    assert printable(b"a\tb\r\n\x1b[2J\xff\xc3\xa9") == "a\tb\n\ufffd[2J\ufffd\u00e9"
