"""R1: the byte-level model counts each target byte once, and writes a sample at the end."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from accel.machine.errors import ConfigError
from runner.builtin.bytes_gpt import (
    IGNORED,
    ByteWindows,
    NextByte,
    TextSample,
    byte_gpt,
    printable,
    stdlib_bytes,
)
from runner.data.datasets import Data
from runner.training.console import Display
from tests.runner.loops import build, recipe_of


def text_of(part: object) -> torch.Tensor:
    assert isinstance(part, ByteWindows)
    return part.text


def windows(text: bytes, context: int, random_start: bool = False) -> ByteWindows:
    return ByteWindows(torch.tensor(list(text), dtype=torch.uint8), context, random_start)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(30):
        (tmp_path / f"module_{index}.py").write_bytes(f"# {index}\n".encode() * 20)
    (tmp_path / "_sysconfigdata_x.py").write_text("secret = 1\n")
    (tmp_path / "notes.txt").write_text("no source")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("inner = 1\n")
    return tmp_path


def test_files_are_whole_and_in_one_part(folder: Path) -> None:
    data = stdlib_bytes(context=8, validation_bytes=500, path=str(folder))
    train, validation = (bytes(text_of(part).tolist()) for part in (data.train, data.validation))
    assert 500 <= len(validation) < 700
    for index in range(30):
        text = (folder / f"module_{index}.py").read_bytes()
        assert (text in train) != (text in validation)
    together = train + validation
    assert len(together) == sum(len(f.read_bytes()) for f in folder.glob("module_*.py"))


@pytest.mark.parametrize(
    "arguments", [{"validation_bytes": 10**9}, {"validation_bytes": 0}, {"context": 10**6}]
)
def test_too_little_text_is_refused(folder: Path, arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"data\.path"):
        stdlib_bytes(path=str(folder), **arguments)


@pytest.mark.parametrize("length", [17, 18, 20, 24, 25])
def test_windows_predict_each_byte_but_the_first_once(length: int) -> None:
    text = bytes(range(length))
    data = windows(text, 8)
    inputs = torch.cat([data[index][0] for index in range(len(data))])
    targets = torch.cat([data[index][1] for index in range(len(data))])
    counted = targets != IGNORED
    assert targets[counted].tolist() == list(text[1:])
    assert inputs[counted].tolist() == list(text[:-1])
    assert all(len(part) == 8 for index in range(len(data)) for part in data[index])


def test_the_model_looks_at_earlier_bytes_alone() -> None:
    torch.manual_seed(0)
    model = byte_gpt(dim=16, num_layers=2, num_heads=2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    values = torch.randint(256, (2, 12))
    logits = model(values)
    assert logits.shape == (2, 12, 256)
    changed = values.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    difference = (model(changed) - logits).abs().amax(dim=(0, 2)).detach()
    assert float(difference[:7].max()) < 1e-5
    assert float(difference[7:].min()) > 1e-3


@torch.no_grad()
def test_the_objective_counts_targets() -> None:
    objective, model = NextByte(), byte_gpt(dim=16, num_layers=1, num_heads=2)
    torch.nn.init.normal_(model.head.weight)  # type: ignore[union-attr, arg-type]
    data = windows(bytes(range(30)), 8)
    values, targets = (
        torch.stack(parts) for parts in zip(*(data[i] for i in range(4)), strict=True)
    )
    assert objective.weights((values, targets)).tolist() == [8, 8, 8, 5]
    log_probabilities = torch.log_softmax(model(values), dim=-1).detach()
    nats = -sum(
        float(log_probabilities[row, column, targets[row, column]])
        for row in range(4)
        for column in range(8)
        if targets[row, column] != IGNORED
    )
    metrics = objective.summarize(objective.evaluate(model, (values, targets)))
    assert metrics["loss"] == pytest.approx(nats / 29, rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(nats / 29 / math.log(2), rel=1e-5)
    assert objective.predict(model, (values, targets))["next_byte"].shape == (4, 8)


# -- generated text


@pytest.fixture
def text(tmp_path: Path) -> Data:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abcdef":
        (folder / f"{name}.py").write_text(f"def {name}(x):\n    return x + {name!r}\n" * 20)
    return stdlib_bytes(context=16, validation_bytes=1000, path=str(folder))


def text_run(run_dir: Path, text: Data, **options: Any) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    torch.manual_seed(0)  # of the weights
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


def test_a_sample_is_written_at_the_end(tmp_path: Path, text: Data) -> None:
    sample = TextSample(prompt="def f", num_bytes=12)
    summary, shown = text_run(tmp_path / "run", text, callbacks={"sample": sample})
    assert len(summary["sample"]) <= 12
    assert "text by the model, after 'def f'" in shown
    again, _ = text_run(tmp_path / "again", text, callbacks={"sample": sample})
    assert again["sample"] == summary["sample"]


def test_what_a_model_writes_does_not_steer_the_terminal() -> None:
    assert printable(b"a\tb\r\n\x1b[2J\xff\xc3\xa9") == "a\tb\n\ufffd[2J\ufffd\u00e9"
