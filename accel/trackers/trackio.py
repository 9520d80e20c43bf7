"""Trackio: a database in the folder of the variable ``TRACKIO_DIR``.

Source: https://huggingface.co/docs/trackio/index
"""

from __future__ import annotations

from typing import Any

from accel.trackers.base import (
    LibraryTracker,
    detached,
    flatten,
    images_of,
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

    def _open(self) -> object:
        import trackio

        return trackio.init(**{"project": self.run_name, **self._kwargs})

    def _close(self, run: Any) -> None:
        import trackio
        from trackio import context_vars

        if context_vars.current_run.get() is run:
            trackio.finish()  # or it is finished again at the exit of the process
        else:
            run.finish()

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
        """Record numbers, nested ones under ``outer/inner``, text, or Trackio's own objects."""
        self.tracker.log(detached(flatten(values)), step=step, **kwargs)

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
