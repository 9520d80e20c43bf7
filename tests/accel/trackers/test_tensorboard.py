"""Scalars, text and images in TensorBoard (R8)."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from accel import Accelerator
from accel.tracking import TensorBoardTracker
from tests.accel.trackers.test_group import scalars


def test_tensorboard_gets_scalars_text_images_and_hyper_parameters(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    config = {"optimizer": {"lr": 0.1}, "name": "digits", "layers": [1, 2]}
    accelerator.init_trackers("run", config=config, init_kwargs={"tensorboard": {"flush_secs": 1}})
    accelerator.log({"loss": torch.tensor(0.5), "note": "fine"}, step=1)
    accelerator.log({"loss": 0.25, "parts": {"a": 1.0}}, step=2)
    accelerator.log_images({"digits": torch.zeros(2, 1, 4, 4)}, step=2)
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    assert isinstance(writer, SummaryWriter)
    assert writer.log_dir == str(tmp_path / "run")
    accelerator.save_state(tmp_path / "state")  # notes ids of runs, of which this has none
    accelerator.end_training()
    assert accelerator.trackers == []
    assert scalars(tmp_path / "run")["loss"] == [(1, 0.5), (2, 0.25)]
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [event.step for event in events.Images("digits")] == [2]
    assert "note/text_summary" in events.Tags()["tensors"]
    assert json.loads((tmp_path / "run" / "hparams.yml").read_text()) == config


def test_a_resumed_run_drops_later_steps_of_charts_with_several_curves(tmp_path: Path) -> None:
    for begin, purge in ((0, {}), (3, {"purge_step": 3})):
        time.sleep(1.1)  # files are read in the order of the seconds in their names
        tracker = TensorBoardTracker("run", tmp_path, **purge)
        tracker.start()
        for step in range(begin, 6):
            tracker.log({"loss": step + begin, "parts/of": {"a": step + begin}}, step=step)
        tracker.finish()
    wanted = [(step, step + (3 if step >= 3 else 0)) for step in range(6)]
    assert scalars(tmp_path / "run") == {"loss": wanted}
    assert scalars(tmp_path / "run" / "parts_of_a") == {"parts/of": wanted}


IMAGES = {
    "a batch [N, C, H, W]": (torch.zeros(2, 3, 4, 5), (4, 10, 3)),
    "[C, H, W]": (torch.zeros(3, 4, 5), (4, 5, 3)),
    "[H, W, C]": (np.zeros((4, 5, 3), np.uint8), (4, 5, 3)),
    "[H, W, 1]": (np.zeros((4, 5, 1), np.uint8), (4, 5, 1)),
    "[H, W]": (torch.zeros(4, 5), (4, 5, 1)),
    "PIL": (Image.new("L", (5, 4)), (4, 5, 1)),
    "PIL with a palette": (Image.new("P", (5, 4)), (4, 5, 3)),
    "several": ([Image.new("RGB", (5, 4)), np.zeros((4, 5, 3), np.uint8)], (4, 10, 3)),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_images_are_taken_in_any_order_of_their_dims(kind: str, tmp_path: Path) -> None:
    """E1: `log_images` takes what the other trackers take."""
    images, (height, width, channels) = IMAGES[kind]
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.log_images({"digits": images}, step=1)
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    (event,) = events.Images("digits")
    with Image.open(io.BytesIO(event.encoded_image_string)) as found:
        assert found.size == (width, height)
        assert len(found.getbands()) in (channels, 3)
