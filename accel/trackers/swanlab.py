"""SwanLab.

``mode="offline"`` writes files that ``swanlab sync`` uploads, ``mode="local"`` files for its own
dashboard.

Source: https://docs.swanlab.cn/en/api/py-init.html
"""

from __future__ import annotations

import inspect
import time
from typing import Any

from accel.logging import get_logger
from accel.trackers.base import (
    LibraryTracker,
    images_of,
    on_main_process,
    plain,
    scalars_and_texts,
)

logger = get_logger(__name__)
SECONDS_TO_FLUSH = 10.0
OLDER_ARGUMENTS = ("experiment_name", "notes", "logdir")  # of `swanlab.init`


class SwanLabTracker(LibraryTracker):
    """Logs to an experiment of SwanLab.

    Args:
        run_name: name of the SwanLab project.
        kwargs: for `swanlab.init`.
    """

    name = "swanlab"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs

    def _open(self) -> object:
        import swanlab

        # It ignores arguments that it does not know.
        parameters = inspect.signature(swanlab.init).parameters.values()
        known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        unknown = [name for name in self._kwargs if name not in (*known, *OLDER_ARGUMENTS)]
        if known and unknown:
            raise TypeError(f"swanlab.init() got an unexpected keyword argument {unknown[0]!r}")
        return swanlab.init(**{"project": self.run_name, **self._kwargs})

    @on_main_process
    def flush(self) -> None:
        """Write what is in the library's queue and buffers: a killed run's file would lack it."""
        if self._run is None:
            return
        try:  # it offers no method for it
            parts, store = self._run._components, self._run._core._store
            queue, consumer = parts.emitter.queue, parts.consumer
            if store is None or not hasattr(consumer, "_batch_empty"):  # it writes nothing here
                return
            end = time.monotonic() + SECONDS_TO_FLUSH
            empty = 0  # times in a row: what is taken from the queue is not in the batch at once
            while empty < 2 and time.monotonic() < end:
                time.sleep(0.05)
                empty = empty + 1 if queue.empty() and consumer._batch_empty else 0
            store.ensure_flushed()
        except AttributeError as error:
            logger.warning_once(
                "This version of swanlab writes its file when the run ends (%s): after a kill, it "
                "may lack values from before the last checkpoint.",
                error,
            )

    def _close(self, run: Any) -> None:
        run.finish(state="crashed" if self.failed else "success")

    @property
    def run_id(self) -> str | None:
        """The experiment's id."""
        return None if self._run is None else str(self._run.id)

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `swanlab.init` that continue an experiment."""
        return {"id": run_id, "resume": "allow"}

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Record hyper-parameters, nested as they are."""
        self.tracker.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Record numbers, nested ones under ``outer/inner``, and text."""
        import swanlab

        numbers, texts = scalars_and_texts(values)
        media = {name: swanlab.Text(text) for name, text in texts.items()}
        self.tracker.log({**numbers, **media}, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, object], step: int | None = None, **kwargs: object
    ) -> None:
        """Record images.

        Args:
            values: by name: images, as `images_of` takes them.
            step: optimizer step.
            kwargs: for `swanlab.Image`.
        """
        import swanlab

        images = {
            name: [swanlab.Image(image, **kwargs) for image in images_of(found)]
            for name, found in values.items()
        }
        self.tracker.log(images, step=step)
