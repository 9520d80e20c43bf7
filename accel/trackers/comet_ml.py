"""Comet.

``online=False`` writes a zip file that ``comet upload`` uploads.

Source: https://www.comet.com/docs/v2/api-and-sdk/python-sdk/reference/start/
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from accel.machine.errors import ConfigError
from accel.trackers.base import (
    LibraryTracker,
    images_of,
    on_main_process,
    plain,
    scalars_and_texts,
)


class CometMLTracker(LibraryTracker):
    """Logs to an experiment of Comet. The API key is Comet's own configuration.

    Args:
        run_name: name of the Comet project.
        kwargs: for `comet_ml.start`.
    """

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs

    def _open(self) -> object:
        import comet_ml

        try:
            return comet_ml.start(**{"project_name": self.run_name, **self._kwargs})
        except ValueError as error:
            raise ConfigError.of(
                "comet_ml",
                f"Comet does not start an experiment: {error}",
                'Set COMET_API_KEY, or init_kwargs={"comet_ml": {"online": False}}.',
            ) from error

    def _close(self, run: Any) -> None:
        run.end()

    @on_main_process
    def flush(self) -> None:
        """Write what the library's threads have yet to write; offline, into the zip file, too."""
        run = self._run
        if run is None:
            return
        run.flush()
        # Until the end the library keeps all in a temporary folder, and the zip file is empty.
        describe = getattr(run, "_write_experiment_meta_file", None)
        if describe is not None:
            run.stop_time = int(time.time() * 1000)
            describe()
            archive = Path(run.offline_directory, run._get_offline_archive_file_name())
            partial = shutil.make_archive(f"{archive}.partial", "zip", run.tmpdir)
            Path(partial).replace(archive)

    @property
    def run_id(self) -> str | None:
        """The experiment's key."""
        return None if self._run is None else str(self._run.get_key())

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `comet_ml.start` that continue an experiment."""
        # Offline, the part before may be uploaded later, or never have been written.
        return {"experiment_key": run_id, "mode": "get_or_create"}

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Record hyper-parameters; Comet joins the names of nested ones."""
        self.tracker.log_parameters(plain(values))

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Record numbers as metrics, nested ones under ``outer/inner``, and text as others."""
        numbers, texts = scalars_and_texts(values)
        if step is not None:
            self.tracker.set_step(step)
        self.tracker.log_metrics(numbers, step=step, **kwargs)
        for name, text in texts.items():
            self.tracker.log_other(name, text)

    @on_main_process
    def log_images(
        self, values: dict[str, object], step: int | None = None, **kwargs: object
    ) -> None:
        """Record images.

        Args:
            values: by name: images, as `images_of` takes them.
            step: optimizer step.
            kwargs: for the experiment's `log_image`.
        """
        for name, found in values.items():
            for image in images_of(found):
                # Comet would stretch bytes to its full range.
                is_bytes = str(getattr(image, "dtype", "")) == "uint8"
                options = {"image_minmax": (0, 255), **kwargs} if is_bytes else kwargs
                self.tracker.log_image(image, name=name, step=step, **options)
