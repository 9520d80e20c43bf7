"""`--device-map`: a run's model is used from where its weights lie, with the same result."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.checkpoint import directory, serialization
from accel.machine.errors import CheckpointError, ConfigError
from accel.utils import has_offloaded_params
from runner.cli import program
from runner.inference import session
from runner.inference.placement import Placement, parse_limits
from tests.runner.runs import make_run

SMALL = {"cpu": "100KB"}  # of a model of 700


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), best=0)


def predicted(run_dir: Path, *flags: str) -> str:
    output = run_dir / "predictions.jsonl"
    assert program.run(["predict", str(run_dir), "--output", str(output), *flags]) == 0
    return output.read_text()


def test_predictions_are_those_of_the_model_in_memory(run_dir: Path) -> None:
    plain = predicted(run_dir)
    assert predicted(run_dir, "--device-map", "auto") == plain
    assert predicted(run_dir, "--device-map", "auto", "--max-memory", "cpu=100KB") == plain


def weights_on_disk(request: session.Request) -> tuple[list[bool], int]:
    """Return of each leaf whether its weights are on disk, and how many files were written."""
    with session.opened(request) as opened:
        (model,) = opened.step.models.values()
        leaves = [m for m in model.modules() if not list(m.children()) and list(m.parameters())]
        written = Path(tempfile.gettempdir()).glob("runner-weights-*/**/*.*")
        return [has_offloaded_params(leaf) for leaf in leaves], len(list(written))


def test_weights_are_read_where_they_lie(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    on_disk, written = weights_on_disk(session.Request(run_dir, placement=Placement("auto", SMALL)))
    assert any(on_disk)
    assert written == 1  # the index
    assert list(tmp_path.iterdir()) == []
    placed = session.Request(run_dir, placement=Placement("auto"))
    assert not any(weights_on_disk(placed)[0])


def resaved(run_dir: Path, change: Any) -> Path:
    """Change the state dict of the run's checkpoint and write it as another kind of state."""
    folder = run_dir / "checkpoints" / "checkpoint_0"
    state = serialization.read_full_model(folder)
    path = folder / directory.model_name(0)
    path.unlink()
    (folder / directory.MANIFEST).unlink()
    change(state, folder)
    files = {file.name: file for file in folder.iterdir()}
    assert path.name not in files or serialization.holds_tensors_alone(folder) is False
    return folder


def as_pickle(state: dict[str, torch.Tensor], folder: Path) -> None:
    serialization.write_model(state, folder, safe=False)


def lacking(state: dict[str, torch.Tensor], folder: Path) -> None:
    del state[next(iter(state))]
    serialization.write_model(state, folder, safe=False)


@pytest.mark.parametrize(("change", "error"), [(as_pickle, ""), (lacking, "do not fit")])
def test_another_kind_of_state_is_written_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, error: str
) -> None:
    run_dir = make_run(tmp_path)
    wanted = session.measure(session.Request(run_dir, splits=("test",)))
    folder = resaved(run_dir, change)
    monkeypatch.setattr("runner.inference.session.find_checkpoint", lambda *_: folder)
    monkeypatch.setattr("runner.inference.session.described", lambda *_: folder.name)
    request = session.Request(run_dir, splits=("test",), placement=Placement("auto", SMALL))
    if error:
        with pytest.raises(CheckpointError, match=error):
            session.measure(request)
    else:
        assert session.measure(request) == wanted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-memory", "cpu=1GB"], "Add --device-map auto"),
        (["--device-map", "auto", "--max-memory", "cpu"], "a limit is DEVICE=SIZE"),
        (["--device-map", "auto", "--max-memory", "gpu=1GB"], "a limit is DEVICE=SIZE"),
        (["device_map=auto"], "--device-map auto"),
    ],
)
def test_mistakes_are_told(
    run_dir: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.run(["eval", str(run_dir), *flags]) == 2
    assert message in capsys.readouterr().err


def test_limits_are_read() -> None:
    assert parse_limits(["0=20GB", "cpu=4GiB"]) == {0: "20GB", "cpu": "4GiB"}
    assert parse_limits(["0=0", "cpu=1GB"]) == {0: "0GB", "cpu": "1GB"}
    for wrong in ("cpu=much", "cpu=1000"):
        with pytest.raises(ConfigError, match=f"{wrong}: .* a size has a unit"):
            parse_limits([wrong])
    for twice in (["cpu=1GB", "cpu=1GB"], ["1=1GB", "01=2GB"]):
        with pytest.raises(ConfigError, match=rf"{twice[1]}: .* a device has one limit"):
            parse_limits(twice)
