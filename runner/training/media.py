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

NUM_BINS, BAR_WIDTH, HEIGHT = 64, 6, 192  # the last two in pixels
Send = Callable[[int], None]  # to the trackers, at a step


def log_media(accelerator: Accelerator, run_dir: Path, step: int, name: str, value: Any) -> None:
    """Write a value to ``media/<step>/`` of the run, and to the trackers that take its kind.

    The same name at the same step replaces the file; trackers have the first, so that a step that
    is made again after a resume gives them nothing twice.

    Raises:
        ConfigError: for a value of another kind than `Run.log_media` names.
    """
    if not accelerator.is_main_process:
        return
    ending, content, send = _converted(accelerator, name, value)
    stem = re.sub(r"[^\w.-]", "_", name)
    path = run_dir / MEDIA / str(step) / f"{stem}.{ending}"
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    directory.write_atomically(path, content)
    if is_new:
        send(step)


def remove_later(run_dir: Path, step: int) -> None:
    """Remove the media of steps that a run resumed at `step` makes again."""
    for folder in (run_dir / MEDIA).glob("*"):
        if int(folder.name) > step:
            shutil.rmtree(folder)


def _converted(accelerator: Accelerator, name: str, value: Any) -> tuple[str, bytes, Send]:
    """Return a file's ending and content, and what sends the value to the trackers."""
    if isinstance(value, str):
        return "txt", value.encode(), lambda step: accelerator.log({name: value}, step=step)
    if hasattr(value, "savefig"):
        value = _picture(lambda file: value.savefig(file, format="png"))
    if _is_table(value):
        columns = list(dict.fromkeys(column for row in value for column in row))
        rows = [[row.get(column, "") for column in columns] for row in value]
        content = _csv(columns, rows)
        return "csv", content, lambda step: _send_table(accelerator, name, columns, rows, step)
    if isinstance(value, torch.Tensor):
        value = value.detach().float().cpu().numpy() if value.dim() == 1 else value
    dims = getattr(value, "ndim", 0)
    if dims == 1:
        counts, edges = np.histogram(value[np.isfinite(value)], NUM_BINS)
        content = _csv(HISTOGRAM, zip(edges, edges[1:], counts, strict=False))
        return "csv", content, lambda step: _send_histogram(accelerator, name, value, counts, step)
    if dims in (2, 3) or hasattr(value, "convert"):  # PIL's have the latter
        (image,) = images_of(value)
        content = png(image)
        return "png", content, lambda step: _send_image(accelerator, name, image, step)
    raise ConfigError.of(
        f"log_media({name!r}, {type(value).__name__})",
        "it takes text, a figure, an image [H, W, C], rows (mappings) of a table, or values [N]",
        "Convert it to one of these.",
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(row, Mapping) for row in value)


def _csv(columns: Sequence[str], rows: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue().encode()


def _picture(save: Callable[[io.BytesIO], object]) -> Any:
    from PIL import Image

    file = io.BytesIO()
    save(file)
    return Image.open(file).convert("RGB")


def png(image: Any) -> bytes:
    """Return an image of `images_of`, or of PIL, as the content of a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    (image if hasattr(image, "save") else Image.fromarray(image)).save(file, "png")
    return file.getvalue()


def bars(counts: Any) -> Any:
    """Draw the counts of a histogram: uint8 [H, W], dark on white."""
    heights = np.repeat(np.asarray(counts, float) / max(1, np.max(counts)) * HEIGHT, BAR_WIDTH)
    is_bar = np.arange(HEIGHT, 0, -1)[:, None] <= heights
    return np.where(is_bar, 64, 255).astype(np.uint8)


# -- to trackers ---------------------------------------------------------------------------


def _send_image(accelerator: Accelerator, name: str, image: Any, step: int) -> None:
    with contextlib.suppress(NotImplementedError):  # no tracker of the run takes images
        accelerator.log_images({name: image}, step=step)


def _send_table(
    accelerator: Accelerator, name: str, columns: list[str], rows: list[list[Any]], step: int
) -> None:
    """Log a table where the tracker has tables, else as text in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    text = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            tracker.log_table(name, columns=columns, data=rows, step=step)
        else:
            tracker.log({name: text}, step=step)


def _send_histogram(
    accelerator: Accelerator, name: str, values: Any, counts: Any, step: int
) -> None:
    """Log values where the tracker has histograms, else their bars as an image."""
    for tracker in accelerator.trackers:
        if hasattr(tracker.tracker, "add_histogram"):
            tracker.tracker.add_histogram(name, values, step)
            tracker.flush()
        else:
            with contextlib.suppress(NotImplementedError):
                tracker.log_images({name: bars(counts)}, step=step)
