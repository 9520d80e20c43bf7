"""``accel env``, ``accel config`` and ``accel merge-weights`` (E1)."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel.commands import launch_config
from accel.commands.program import main
from accel.machine.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    return tmp_path / "accelerate" / "default_config.yaml"


def answers(monkeypatch: pytest.MonkeyPatch, *lines: str) -> Iterator[str]:
    """Type these lines; return those that nobody asked for."""
    left = iter(lines)

    def typed(question: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", typed)
    return left


def test_the_machine_is_described(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"torch          {torch.__version__}" in shown
    assert "accelerator    none" in shown
    assert f"none ({home} does not exist)" in shown
    launch_config.write({"num_processes": 3}, home)
    assert main(["env"]) == 0
    assert "  num_processes: 3" in capsys.readouterr().out
    launch_config.write({"debug": True}, home.with_name("mine.yaml"))
    assert main(["env", "--config-file", str(home.with_name("mine.yaml"))]) == 0
    assert "  debug: True" in capsys.readouterr().out


def test_settings_of_the_machine_are_written(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "default", "--mixed_precision", "bf16"]) == 0
    assert capsys.readouterr().out == f"Settings written to {home}\n"
    assert json.loads(home.read_text()) == launch_config.basic_config("bf16")
    assert main(["config", "default"]) == 2
    assert f"{home}: it is there already" in capsys.readouterr().err


def test_a_file_is_brought_up_to_date(home: Path) -> None:
    launch_config.write({"mixed_precision": "fp16", "gpu_ids": "all"}, home)
    launch_config.main(["update"])
    written = json.loads(home.read_text())
    assert (written["mixed_precision"], written["gpu_ids"]) == ("fp16", "all")
    assert written["num_machines"] == 1


def test_questions_are_answered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = answers(monkeypatch, "maybe", "yes", "", "0", "2", "FSDP", "bf61", "bf16")
    launch_config.main([])
    assert next(left, None) is None
    found = launch_config.read(home)
    assert (found["num_processes"], found["use_cpu"], found["use_fsdp"]) == (2, True, True)
    assert found["mixed_precision"] == "bf16"


def test_questions_about_machines_and_deepspeed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, "no", "2", "1", "10.0.0.1", "", "8", "deepspeed", "")
    launch_config.main(["--config_file", str(home.with_name("mine.yaml"))])
    found = launch_config.read(home.with_name("mine.yaml"))
    assert (found["num_machines"], found["machine_rank"]) == (2, 1)
    assert (found["main_process_ip"], found["main_process_port"]) == ("10.0.0.1", 29500)
    assert (found["num_processes"], found["use_deepspeed"]) == (8, True)


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch)
    with pytest.raises(ConfigError, match=r"nobody answers.*accel config default"):
        launch_config.main([])


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lunch"])
    assert ended.value.code == 2
    assert "launch" in capsys.readouterr().err


def test_weights_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "state"
    source.mkdir()
    save_file({"weight": torch.arange(3.0)}, source / "model.safetensors")
    assert main(["merge-weights", str(source), str(tmp_path / "merged")]) == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged["weight"].tolist() == [0.0, 1.0, 2.0]
    flags = ["--unsafe_serialization", "--remove-checkpoint-dir"]
    assert main(["merge-weights", *flags, str(source), str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged" / "pytorch_model.bin").is_file()
    assert not source.exists()
    assert main(["merge-weights", str(source), str(tmp_path)]) == 1
    assert "there is no such file or folder" in capsys.readouterr().err
