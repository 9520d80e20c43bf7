"""T1, R2: media are files by step, in trackers once, and in the report."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel.machine.errors import ConfigError
from runner.data.datasets import Data
from runner.reporting import html_page
from runner.training import loop as loops_of
from runner.training.run import Callback
from tests.runner import loops
from tests.runner.loops import NUM_TRAIN, Points, recipe_of
from tests.runner.reporting.test_html_page import read
from tests.runner.written_runs import write_run

ROWS = [{"word": "a", "count": 1}, {"word": "b<", "share": 0.5}]
FILES = ["curve.png", "image.png", "rows.csv", "said_here.txt", "values.csv"]


class Showing(Callback):
    """Logs a value of each kind at every second step."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def on_step(self, loop: loops_of.Loop) -> None:
        from matplotlib.figure import Figure

        step = loop.state.step
        if step % 2:
            return
        figure = Figure(figsize=(1, 1))
        figure.add_subplot().plot([0, step])
        loop.log_media("curve", figure)
        loop.log_media("image", torch.linspace(0, 1, 12).reshape(3, 2, 2))
        loop.log_media("rows", ROWS)
        loop.log_media("said/here", f"step {step} <&")
        loop.log_media("values", torch.tensor([0.0, 1.0, 1.0, float("nan"), step]))
        if step == self.fails_at:
            raise RuntimeError("killed")


def train(run_dir: Path, callback: Showing, resume_from: str | None = None) -> None:
    recipe = recipe_of(
        trainer__epochs=2, checkpoint__every_steps=5, tracker__log_with=["tensorboard", "csv"]
    )
    given = {"callbacks": {"show": callback}, "resume_from": resume_from}
    loop = loops.build(run_dir, recipe, data=Data(Points(NUM_TRAIN)), **given)
    try:
        loop.run()
    finally:
        loop.accelerator.end_training()


def files(run_dir: Path) -> dict[str, bytes]:
    found = sorted((run_dir / "media").rglob("*.*"))
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in found}


def events(run_dir: Path) -> dict[str, list[int]]:
    """Return the steps of images and histograms; TensorBoard's reader purges no text."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = {"images": 0, "histograms": 0}  # all
    read = EventAccumulator(str(run_dir / "tensorboard" / "run"), sizes).Reload()
    assert {"rows/text_summary", "said/here/text_summary"} <= {*read.Tags()["tensors"]}
    found = {name: read.Images(name) for name in read.Tags()["images"]}
    found |= {name: read.Histograms(name) for name in read.Tags()["histograms"]}
    return {name: [event.step for event in of] for name, of in found.items()}


def test_each_kind_is_a_file_an_entry_of_trackers_and_a_part_of_the_report(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one")
    train(path, Showing())
    assert sorted(files(path)) == [
        f"media/{step}/{name}" for step in ("10", "2", "4", "6", "8") for name in FILES
    ]
    folder = path / "media" / "10"
    assert (folder / "rows.csv").read_text() == "word,count,share\na,1,\nb<,,0.5\n"
    counts = [int(row["count"]) for row in csv.DictReader((folder / "values.csv").open())]
    assert (len(counts), sum(counts), counts[-1]) == (64, 4, 1)
    assert events(path) == {n: [2, 4, 6, 8, 10] for n in ("curve", "image", "values")}
    text = html_page.page("", read(tmp_path))
    assert "step 10 &lt;&amp;" in text
    assert "b&lt;" in text
    for name in ("curve", "image", "values"):
        assert text.count(f'alt="{name}" src="data:image/png;base64,') == 1


def test_a_killed_run_has_nothing_twice(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, Showing())
    with pytest.raises(RuntimeError, match="killed"):
        train(killed, Showing(fails_at=8))
    loops.forget()
    (killed / "media" / "12").mkdir()
    time.sleep(1 - time.time() % 1)  # TensorBoard orders its files by the second in their names
    train(killed, Showing(), str(killed / "checkpoints" / "checkpoint_0"))
    assert (files(killed), events(killed)) == (files(whole), events(whole))


@pytest.mark.parametrize("value", [3, {"a": 1}, np.zeros((2, 2, 2, 2, 2)), None])
def test_other_kinds_are_refused(value: Any, tmp_path: Path) -> None:
    loop = loops.build(tmp_path, recipe_of())
    with pytest.raises(ConfigError, match=r"log_media\('x', \w+\): it takes text"):
        loop.log_media("x", value)
