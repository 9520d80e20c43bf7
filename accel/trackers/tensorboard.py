"""TensorBoard event files.

Source: https://docs.pytorch.org/docs/stable/tensorboard.html
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.trackers.base import GeneralTracker, flatten, numbers, on_main_process, plain

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HPARAM_TYPES = (bool, int, float, str)


class TensorBoardTracker(GeneralTracker):
    """Writes to ``<logging_dir>/<run_name>``.

    Args:
        run_name: folder of the run.
        logging_dir: folder of all runs.
        kwargs: for `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = str(Path(logging_dir) / run_name)
        self._kwargs = kwargs
        self._writer: SummaryWriter | None = None

    @property
    def tracker(self) -> SummaryWriter:
        """The writer; made on first use."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.logging_dir, **self._kwargs)
        return self._writer

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        self.tracker.flush()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record hyper-parameters in the event file, and as they are in ``hparams.yml``."""
        kept = plain(values)
        flat = flatten(kept)
        shown = {k: v if isinstance(v, HPARAM_TYPES) else str(v) for k, v in flat.items()}
        self.tracker.add_hparams(shown, metric_dict={}, run_name=".")
        self.tracker.flush()
        # JSON is YAML.
        path = Path(self.logging_dir) / "hparams.yml"
        path.write_text(json.dumps(kept, indent=2) + "\n")

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
        """Record images: [N, C, H, W] unless ``dataformats`` says otherwise."""
        for name, images in values.items():
            self.tracker.add_images(name, images, global_step=step, **kwargs)
        self.tracker.flush()

    @on_main_process
    def flush(self) -> None:
        """Write the events that are buffered."""
        if self._writer is not None:
            self._writer.flush()

    @on_main_process
    def finish(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
