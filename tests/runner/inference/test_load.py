"""L1: `runner.load` gives a run's models, or says what it cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import runner
from accel.machine.errors import CheckpointError
from runner.inference.load import find_checkpoint
from tests.runner.trained_runs import make_run


def weights_of(run_dir: Path, number: int, index: int = 0) -> dict[str, torch.Tensor]:
    name = "model.safetensors" if index == 0 else f"model_{index}.safetensors"
    return load_file(run_dir / "checkpoints" / f"checkpoint_{number}" / name)


def equal(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == weights.keys() and all(torch.equal(state[k], weights[k]) for k in state)


def test_the_best_model_is_loaded_unless_another_is_asked_for(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, checkpoints=3, best=1)
    model, cfg = runner.load(run_dir)
    assert not model.training
    assert equal(model, weights_of(run_dir, 1))
    assert cfg.model["dropout"] == 0
    for which, number in (("best", 1), ("last", 2), ("checkpoint_0", 0)):
        assert equal(runner.load(str(run_dir), which)[0], weights_of(run_dir, number))
    path = run_dir / "checkpoints" / "checkpoint_0"
    assert equal(runner.load(run_dir, path)[0], weights_of(run_dir, 0))
    model(torch.randn(2, 1, 8, 8))


def test_a_run_that_keeps_no_best_has_a_last(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, checkpoints=2)
    assert find_checkpoint(run_dir).name == "checkpoint_1"
    with pytest.raises(CheckpointError, match="'best'"):
        runner.load(run_dir, "best")


def test_a_step_of_several_models_gives_them_by_name(tmp_path: Path) -> None:
    models, _ = runner.load(make_run(tmp_path, "experiment=gan"))
    assert len(models) == 2
    assert all(isinstance(model, torch.nn.Module) for model in models.values())


def test_broken_and_missing_checkpoints_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = make_run(tmp_path, best=0)
    with pytest.raises(CheckpointError, match="checkpoint_9"):
        runner.load(run_dir, "checkpoint_9")
    file = run_dir / "checkpoints" / "checkpoint_0" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    caplog.clear()
    for which in (None, "last"):
        with pytest.raises(CheckpointError, match=r"has no complete checkpoint in .* Restore"):
            runner.load(run_dir, which)
    assert "model.safetensors was altered" in caplog.text
    assert "Use another" not in caplog.text
    with pytest.raises(CheckpointError, match=r"model\.safetensors was altered"):
        runner.load(run_dir, "best")


def test_a_damaged_best_state_is_passed_over_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path, checkpoints=3, best=1)
    runner.load(run_dir)
    assert "checkpoint_1 (step 1, the best)" in capsys.readouterr().err
    file = run_dir / "checkpoints" / "checkpoint_1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert equal(runner.load(run_dir)[0], weights_of(run_dir, 2))
    assert "runner.load: the weights of" in (said := capsys.readouterr().err)
    assert "checkpoint_2" in said
    assert "The best state is skipped." in caplog.text
    with pytest.raises(CheckpointError, match=r"model\.safetensors was altered"):
        runner.load(run_dir, "best")
