"""TensorBoard event files.

Source: https://docs.pytorch.org/docs/stable/tensorboard.html
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from accel.trackers.base import LibraryTracker, Values, flatten, numbered, numbers, on_main_process

HPARAM_TYPES = (bool, int, float, str)


class TensorBoardTracker(LibraryTracker):
    """Writes to ``<logging_dir>/<run_name>``.

    Args:
        run_name: folder of the run.
        logging_dir: folder of all runs.
        kwargs: for `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    alias = "writer"
    id_path = ""
    flushes = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = str(Path(logging_dir) / run_name)

    def _open(self) -> object:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(self.logging_dir, **self._kwargs)
        writer.flush()
        return writer

    def _close(self, run: Any) -> None:
        run.close()

    def _configure(self, values: dict[str, Any]) -> None:
        """Record hyper-parameters in the event file, and as they are in ``hparams.yml``."""
        flat = flatten(values)
        shown = {k: v if isinstance(v, HPARAM_TYPES) else str(v) for k, v in flat.items()}
        self.tracker.add_hparams(shown, metric_dict={}, run_name=".")
        self.tracker.flush()
        # JSON is YAML.
        path = Path(self.logging_dir) / "hparams.yml"
        path.write_text(json.dumps(values, indent=2) + "\n")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars, text as text, dicts of numbers as scalars of one chart."""
        writer = self.tracker
        for name, value in values.items():
            if isinstance(value, str):
                writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                found = numbers(value)
                if "purge_step" in self._kwargs:
                    self._purge_curves(name, found)
                writer.add_scalars(name, found, global_step=step, **kwargs)
            else:
                for one in numbers({name: value}).values():
                    writer.add_scalar(name, one, global_step=step, **kwargs)
        writer.flush()

    def _purge_curves(self, chart: str, names: Iterable[str]) -> None:
        """Drop later steps of the curves of a chart, each of which has a folder and a file."""
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = self.tracker
        for name in names:
            folder = f"{writer.get_logdir()}/{chart.replace('/', '_')}_{name}"
            if folder not in writer.all_writers:  # `add_scalars` would make one that drops nothing
                one: Any = SummaryWriter(folder, **self._kwargs)
                writer.all_writers[folder] = one.file_writer

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: by name: images, as `images_of` takes them; with ``dataformats``, arrays or
                tensors [N, …] of that order.
            step: optimizer step.
            kwargs: for `SummaryWriter.add_images`, or `add_image` where there is one of a name.
        """
        if "dataformats" in kwargs:
            for name, images in values.items():
                self.tracker.add_images(name, images, global_step=step, **kwargs)
            self.tracker.flush()
        else:
            super().log_images(values, step, **kwargs)

    def _write(self, values: Values, step: int | None, **kwargs: Any) -> None:
        for name, found in values.images.items():
            arrays = [_channels_last(image) for image in found]
            if len({array.shape for array in arrays}) == 1:  # TensorBoard puts them side by side
                arrays = [np.stack(arrays)]
            for tag, array in numbered(name, arrays):
                order = "NHWC" if array.ndim == 4 else "HWC"
                add = self.tracker.add_images if array.ndim == 4 else self.tracker.add_image
                add(tag, array, global_step=step, dataformats=order, **kwargs)
        self.tracker.flush()


def _channels_last(image: Any) -> np.ndarray[Any, Any]:
    """Return an image [H, W, C]: of an array, a PIL image or the path of one."""
    if isinstance(image, str | os.PathLike):
        from PIL import Image

        image = Image.open(image)
    if getattr(image, "mode", "RGB") not in ("L", "RGB", "RGBA"):  # of PIL
        image = image.convert("RGB")
    array = np.asarray(image)
    return array[..., None] if array.ndim == 2 else array
