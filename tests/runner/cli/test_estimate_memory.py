"""``runner estimate-memory``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.cli.dispatch import run
from runner.exit_codes import REFUSED

SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 50}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run(["estimate-memory", *arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["estimate-memory", *arguments]) == REFUSED
    return capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import GPT2Config  # seconds, in each process that collects this file

    config = GPT2Config(**SIZES, **SPECIAL)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    own = GPT2LMHeadModel(GPT2Config(**SIZES, **SPECIAL))
    tensors = [*own.parameters(), *own.buffers()]  # the head has the embedding's weight
    held = sum(tensor.nbytes for tensor in tensors)
    options = ("--format", "fp32", "--strategy", "ddp")
    for place in (folder, folder / "config.json"):
        (found,) = estimated(capsys, str(place), *options)
        assert found["parameters"] == held
        assert found["gradients"] == sum(parameter.nbytes for parameter in own.parameters())
        assert found["total"] == held + found["gradients"] + found["optimizer_state"]


def test_what_torchao_logs_at_import_is_not_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoConfig

    right = AutoConfig.from_pretrained

    def chatty(*args: Any, **kwargs: Any) -> Any:
        logging.getLogger("torchao").warning("Failed to load")
        return right(*args, **kwargs)

    monkeypatch.setattr(AutoConfig, "from_pretrained", chatty)
    assert run(["estimate-memory", str(folder), "--strategy", "ddp"]) == 0
    assert "Failed to load" not in caplog.text


def test_a_headless_model_is_the_plain_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (with_head,) = estimated(capsys, str(folder), "--format", "fp32", "--strategy", "ddp")
    path.write_text(json.dumps({**config, "architectures": None}))
    (without,) = estimated(capsys, str(folder), "--format", "fp32", "--strategy", "ddp")
    assert without["parameters"] == with_head["parameters"]  # tied


def test_a_registered_factory(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--format", "fp32", "--format", "bf16", "--num-processes", "2")
    found = estimated(capsys, "byte_gpt", "num_layers=1", *options, "--optimizer", "SGD")
    assert {one["format"] for one in found} == {"fp32", "bf16"}
    assert {one["num_processes"] for one in found} == {2}
    replicated = next(one for one in found if one["strategy"] == "ddp")
    assert replicated["optimizer_state"] == 0
    deeper = estimated(capsys, "byte_gpt", "num_layers=2", *options)
    assert deeper[0]["parameters"] > found[0]["parameters"]


def test_a_dotted_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("torch.nn.Linear", "in_features=4", "out_features=8", "--format", "fp32")
    found = estimated(capsys, *arguments)
    assert found[0]["parameters"] == 4 * torch.nn.Linear(4, 8).weight.numel() + 32


def test_a_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate-memory", "cnn", "--num_processes", "2", "--optimizer", "LBFGS"]) == 0
    shown = capsys.readouterr().out
    assert "cnn · 38,314 parameters · LBFGS, a process of 2 processes" in shown
    assert "153.3 kB" in shown
    assert "?" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_makes_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it holds no config.json" in refused(capsys, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    assert "transformers makes no model" in refused(capsys, str(tmp_path))
    assert "has all that is to know" in refused(capsys, str(tmp_path), "n_layer=2")
    assert "['byte_gpt', 'cnn']" in refused(capsys, "cnnn")
    assert "there is no such folder" in refused(capsys, "./cnnn")
    assert "there is no such folder" in refused(capsys, str(tmp_path / "v1.5"))
    assert "it is KEY=VALUE" in refused(capsys, "cnn", "wide")
    assert "width=[: the value is YAML" in refused(capsys, "cnn", "width=[")
    assert "model.widht" in refused(capsys, "cnn", "widht=2")
    assert "is not trusted" in refused(capsys, "os.path.join")
    assert "Choose format='fp32'" in refused(capsys, "cnn", "--format", "fp8")
    assert "format='fp31'" in refused(capsys, "cnn", "--format", "fp31")
    assert "'AdamW'" in refused(capsys, "cnn", "--optimizer", "adamw")
    assert "none" in refused(capsys, "cnn", "--format", "int8")


@pytest.mark.parametrize(
    "wrong", [{"n_layer": "two"}, {"n_embd": 33}, {"vocab_size": -1}, {"n_embd": None}]
)
def test_a_wrong_value_of_a_folder_is_refused(
    wrong: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **wrong}))
    message = refused(capsys, str(folder))
    assert "transformers makes no model of its config.json" in message
    assert "Correct the value there" in message
