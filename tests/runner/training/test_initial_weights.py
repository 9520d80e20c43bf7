"""C1, E3: a new run begins with the weights of a run, a checkpoint or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accel.checkpoint.load import read_model
from accel.machine.errors import ConfigError
from runner.runs import directory
from runner.training.initial_weights import _source
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.callbacks.test_averaging import Recorder, equal
from tests.runner.trained_runs import make_run
from tests.runner.training.test_strategies import ENGINES, shown


def begin(folder: str, init_from: Any, engine: str = "ddp") -> tuple[dict[str, Any], str]:
    """Return the first weights of a run, and what a person sees of it."""
    recorder = Recorder()
    kept = {"checkpoint__at_end": False, "checkpoint__keep_best": 0}
    recipe = loops.recipe_of(trainer__max_steps=1, init_from=init_from, **kept, **ENGINES[engine])
    text = shown(Path(folder), recipe, callbacks={"recorder": recorder})
    loops.forget()
    return dict(recorder.seen[0]), " ".join(text.split())


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Return a checkpoint; its weights are also in files beside it."""
    loops.run(tmp_path / "trained", loops.recipe_of(trainer__max_steps=2))
    path, state = loops.newest(tmp_path / "trained"), dict(loops.weights(tmp_path / "trained"))
    (tmp_path / "folder").mkdir()
    for place in ("weights.safetensors", "folder/model.safetensors"):
        save_file(state, tmp_path / place)
    torch.save(state, tmp_path / "weights.pt")
    return path


def test_every_source_of_weights_is_read(trained: Path, tmp_path: Path) -> None:
    for name in (trained, "weights.safetensors", "folder", "weights.pt"):
        seen, text = begin(str(tmp_path / "new"), str(tmp_path / name))
        equal(seen, read_model(trained))
        assert "4 weights of" in text
    for best in (0, None):
        run_dir = make_run(tmp_path, checkpoints=2, best=best)
        assert _source(run_dir)[0].name == f"checkpoint_{0 if best == 0 else 1}"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "tp", "zero2", "zero3"])
def test_weights_are_loaded_under_each_strategy(engine: str, trained: Path, tmp_path: Path) -> None:
    for seen, _ in run_distributed(begin, 2, str(tmp_path / "new"), str(trained), engine):
        equal(seen, read_model(trained))


def test_what_does_not_fit_is_told_or_refused(trained: Path, tmp_path: Path) -> None:
    state = read_model(trained)
    path, new = str(tmp_path / "other.safetensors"), str(tmp_path / "new")
    fits = {"0.weight": state["0.weight"], "0.bias": state["0.bias"]}
    save_file({**fits, "3.weight": torch.ones(2, 8), "old": torch.ones(1)}, path)
    seen, text = begin(new, path)
    assert "loaded; 1 missing: 3.bias; 1 unexpected: old; 1 of other shape: 3.weight" in text
    first, _ = begin(new, None)
    equal(seen, {**first, **fits})
    seen, text = begin(new, {"path": path, "include": ["0.*"], "exclude": ["*.bias"]})
    equal(seen, {**first, "0.weight": state["0.weight"]})
    for wrong, message in (
        ({"path": path, "strict": True}, r"missing: 3.bias"),
        ({"path": path, "include": "old"}, r"0 weights of"),
        ({"path": path, "include": ["9.*"]}, r"init_from.include: 9.\*: no parameter"),
    ):
        with pytest.raises(ConfigError, match=message):
            begin(new, wrong)


def test_a_path_that_does_not_exist_is_refused_before_anything_starts() -> None:
    for given, value in (("nowhere", "init_from=nowhere"), ({"paht": "x"}, "init_from={'paht'")):
        (problem,) = directory.problems(loops.recipe_of(init_from=given))
        assert problem.value.startswith(value)
