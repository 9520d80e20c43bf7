"""R1: the byte-level model counts each target byte once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from accel.machine.errors import ConfigError
from runner.builtin.bytes_gpt import (
    IGNORED,
    ByteWindows,
    NextByte,
    byte_gpt,
    stdlib_bytes,
)


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


def test_the_standard_library_is_found_and_large() -> None:
    data = stdlib_bytes()
    train, validation = text_of(data.train), text_of(data.validation)
    assert train.dtype == torch.uint8
    assert len(validation) >= 200_000
    assert len(train) > 2_000_000
    assert data.test is None
    inputs, targets = data.train[0]
    assert inputs.shape == targets.shape == (128,)
    assert inputs.dtype == targets.dtype == torch.int64


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
