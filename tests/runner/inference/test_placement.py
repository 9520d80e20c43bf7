"""L1, E4: `--device-map` spreads a model and does not change its predictions."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from accel.utils import has_offloaded_params
from runner import cli
from runner.inference import session
from runner.inference.load import Placement
from tests.runner.trained_runs import make_run

SMALL = {"cpu": "100KB"}  # of a model of 700


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), best=0)


def predicted(run_dir: Path, *flags: str) -> str:
    output = run_dir / "predictions.jsonl"
    assert cli.main(["predict", str(run_dir), "--output", str(output), *flags]) == 0
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
    assert cli.main(["eval", str(run_dir), *flags]) == 2
    assert message in capsys.readouterr().err
