"""L1: figures of a report: their content, their size, and that they stand in a page."""

from __future__ import annotations

import builtins
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.machine.errors import MissingPackageError
from runner.reporting import plots
from runner.reporting.curves import Band
from runner.runs import discovery
from runner.runs.record import RunRecord
from tests.runner.written_runs import write_run, write_search

PNG = b"\x89PNG"


def band(num_runs: int = 2, points: int = 120) -> Band:
    steps = np.arange(1, points + 1, dtype=float)
    return Band(steps, 1 / steps, 0.9 / steps, 1.1 / steps, num_runs)


def check(picture: plots.Picture, *texts: str) -> None:
    root = ElementTree.fromstring(picture.svg)
    words = "".join(root.itertext())
    for text in texts:
        assert text in words, text
    assert picture.png.startswith(PNG)
    assert plots.INK not in picture.svg
    assert "currentColor" in picture.svg
    assert len(picture.svg) < 80_000
    assert "http" not in picture.svg.replace("http://www.w3.org/", "")


def test_learning_curves_name_the_best_groups_and_draw_the_others_thin() -> None:
    bands = {f"lr={n} _$x_<&>": band(1 + n % 2, 120 if n else 2) for n in range(12)}
    picture = plots.learning_curves("validation/loss", bands, lower_is_better=True)
    check(picture, "step", "lr=0 _$x_<&>", "lr=7 _$x_<&> (2 seeds)")
    assert "lr=9" not in picture.svg
    assert picture.name == "curve-validation-loss"


@pytest.mark.parametrize(
    ("key", "values", "text"),
    [
        ("optimizer.lr", (1e-4, 1e-2), "10"),
        ("model.width", (16, 32), "model.width"),
        ("optimizer.name", ("adamw", "sgd"), "adamw"),
        ("scheduler.name", ("cosine", None), "null"),
        ("deterministic", (True, False), "true"),
    ],
)
def test_the_objective_against_a_key_of_any_kind(
    key: str, values: tuple[Any, Any], text: str, tmp_path: Path
) -> None:
    runs = [
        RunRecord(write_run(tmp_path / f"{n}", {key: value}, best=0.1 * (n + 1)))
        for n, value in enumerate(values)
    ]
    check(plots.objective_by_key(key, runs), text, "loss")


def test_runs_that_lack_a_key_have_a_place_of_their_own(tmp_path: Path) -> None:
    runs = discovery.find_runs([write_search(tmp_path)])
    check(plots.objective_by_key("optimizer", runs), "adamw", "sgd")
    check(plots.objective_by_key("optimizer.momentum", runs), plots.NO_VALUE, "0.2")


def test_a_page_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingPackageError, match=r"accel-runner\[report\]"):
        plots.require_matplotlib()
