"""Trackio: a database in the folder of the variable ``TRACKIO_DIR``.

Source: https://huggingface.co/docs/trackio/index
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from accel.trackers.base import (
    LibraryTracker,
    RecordedSteps,
    detached,
    flatten,
    images_of,
    number,
    on_main_process,
    plain,
)


class TrackioTracker(LibraryTracker):
    """Logs to a run of Trackio.

    Args:
        run_name: name of the Trackio project.
        kwargs: for `trackio.init`.
    """

    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self._recorded = RecordedSteps(self.name, self._steps)

    def _open(self) -> object:
        import trackio

        return trackio.init(**{"project": self.run_name, **self._kwargs})

    def _steps(self, name: str) -> list[int]:
        """Return the steps of a value that a continued run has in the database here."""
        if self._kwargs.get("resume", "never") == "never":
            return []
        from trackio.sqlite_storage import SQLiteStorage

        run = self.tracker
        logs = SQLiteStorage.get_logs(run.project, run.name)
        return [record["step"] for record in logs if name in record]

    def _close(self, run: Any) -> None:
        import trackio
        from trackio import context_vars

        if context_vars.current_run.get() is run:
            trackio.finish()  # or it is finished again at the exit of the process
        else:
            run.finish()

    @on_main_process
    def flush(self) -> None:
        """Write what Trackio's thread has yet to write into the database here."""
        run = self._run
        # Trackio has no public way to wait for its thread short of `finish`.
        write = getattr(run, "_flush_queues_inline", None)
        if write is not None and run._is_local:
            with run._client_lock:
                write()

    @property
    def run_id(self) -> str | None:
        """The run's name, unique in its project."""
        return None if self._run is None else str(self._run.name)

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `trackio.init` that continue a run."""
        return {"name": run_id, "resume": "allow"}

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Record hyper-parameters, nested as they are; Trackio stores them with the first log."""
        self.tracker.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Record numbers, nested ones under ``outer/inner``, text, or Trackio's own objects.

        A value of a continued run is kept where it has that step already.
        """
        # One array would keep Trackio's thread from writing the values beside it.
        found = {
            name: value
            for name, value in detached(flatten(values)).items()
            if not isinstance(value, (torch.Tensor, np.ndarray)) or number(name, value) is not None
        }
        missing = self._recorded.missing(found, step)
        if missing:
            self.tracker.log(missing, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, object], step: int | None = None, **kwargs: object
    ) -> None:
        """Record images.

        Args:
            values: by name: images, as `images_of` takes them; several of one name are named
                ``<name>/<index>``.
            step: optimizer step.
            kwargs: for `trackio.Image`.
        """
        import trackio

        for name, found in values.items():
            images = [trackio.Image(image, **kwargs) for image in images_of(found)]
            one = {name: images[0]}
            named = {f"{name}/{index}": image for index, image in enumerate(images)}
            self.tracker.log(one if len(images) == 1 else named, step=step)
