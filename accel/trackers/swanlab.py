"""SwanLab.

``mode="offline"`` writes files that ``swanlab sync`` uploads, ``mode="local"`` files for its own
dashboard.

Source: https://docs.swanlab.cn/en/api/py-init.html
"""

from __future__ import annotations

from typing import Any

from accel.trackers.base import (
    LibraryTracker,
    images_of,
    on_main_process,
    plain,
    scalars_and_texts,
)


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

        return swanlab.init(**{"project": self.run_name, **self._kwargs})

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
