"""Media of a run: text, figures, images, tables and histograms, as files and in trackers."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accel.checkpoint import directory
from accel.machine.errors import ConfigError
from accel.trackers.base import images_of
from runner.runs.json_files import HISTOGRAM, MEDIA

if TYPE_CHECKING:
    from accel import Accelerator

NUM_BINS, HEIGHT, BAR_WIDTH = 64, 192, 6  # of histograms; as pictures, in pixels


def log_media(accelerator: Accelerator, run_dir: Path, step: int, name: str, value: Any) -> None:
    """Write a value to ``media/<step>/`` of the run, and to the trackers that take its kind.

    The first value of a name at a step counts: a step that is made again after a resume gives
    trackers nothing twice.

    Raises:
        ConfigError: for a value of another kind than `Run.log_media` names.
    """
    if not accelerator.is_main_process:
        return
    ending, content, send = _converted(name, value)
    stem = re.sub(r"[^\w.-]", "_", name)
    path = run_dir / MEDIA / str(step) / f"{stem}.{ending}"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    directory.write_atomically(path, content)
    for tracker in accelerator.trackers:
        with contextlib.suppress(NotImplementedError):  # it takes no images
            send(tracker, step)


def remove_later(run_dir: Path, step: int) -> None:
    """Remove the media of steps that a run resumed at `step` makes again."""
    for folder in (run_dir / MEDIA).glob("*"):
        if int(folder.name) > step:
            shutil.rmtree(folder)


def _converted(name: str, value: Any) -> tuple[str, bytes, Callable[[Any, int], object]]:
    """Return a file's ending and content, and what sends the value to a tracker."""
    from PIL import Image

    if isinstance(value, str):
        return "txt", value.encode(), lambda one, step: one.log({name: value}, step=step)
    if isinstance(value, (list, tuple)) and all(isinstance(row, Mapping) for row in value):
        columns = list(dict.fromkeys(column for row in value for column in row))
        rows = [[row.get(column, "") for column in columns] for row in value]
        return (
            "csv",
            _csv([columns, *rows]),
            lambda one, step: _table(one, step, name, columns, rows),
        )
    if isinstance(value, torch.Tensor) and value.dim() == 1:
        value = value.detach().float().cpu().numpy()
    if getattr(value, "ndim", 0) == 1:
        counts, edges = np.histogram(value[np.isfinite(value)], NUM_BINS)
        content = _csv([HISTOGRAM, *zip(edges, edges[1:], counts, strict=False)])
        return "csv", content, lambda one, step: _histogram(one, step, name, value, counts)
    file = io.BytesIO()
    if hasattr(value, "savefig"):
        value.savefig(file, format="png")
        value = Image.open(file).convert("RGB")
    elif getattr(value, "ndim", 0) in (2, 3):
        value = Image.fromarray(images_of(value)[0])
    if isinstance(value, Image.Image):
        value.save(file := io.BytesIO(), "png")
        return "png", file.getvalue(), lambda one, step: one.log_images({name: value}, step=step)
    raise ConfigError.of(
        f"log_media({name!r}, {type(value).__name__})",
        "it takes text, a figure, an image [H, W, C], rows (mappings) of a table, or values [N]",
        "Convert it to one of these.",
    )


def _csv(rows: Sequence[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _table(tracker: Any, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Log a table where the tracker has tables, else as text in Markdown."""
    if hasattr(tracker, "log_table"):
        tracker.log_table(name, columns=columns, data=rows, step=step)
        return
    lines = [columns, ["---"] * len(columns), *rows]
    text = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    tracker.log({name: text}, step=step)


def _histogram(tracker: Any, step: int, name: str, values: Any, counts: Any) -> None:
    """Log values where the tracker has histograms, else their bars as an image."""
    if hasattr(tracker.tracker, "add_histogram"):
        tracker.tracker.add_histogram(name, values, step)
        tracker.flush()
        return
    heights = np.repeat(counts / max(1, counts.max()) * HEIGHT, BAR_WIDTH)
    tracker.log_images({name: np.arange(HEIGHT, 0, -1)[:, None] > heights}, step=step)
