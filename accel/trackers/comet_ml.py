"""Comet.

``online=False`` writes a zip file that ``comet upload`` uploads.

Source: https://www.comet.com/docs/v2/api-and-sdk/python-sdk/reference/start/
"""

from __future__ import annotations

from typing import Any

from accel.machine.errors import ConfigError
from accel.trackers.base import LibraryTracker, Values


class CometMLTracker(LibraryTracker):
    """Logs to an experiment of Comet. The API key is Comet's own configuration.

    Args:
        run_name: name of the Comet project.
        kwargs: for `comet_ml.start`.
    """

    name = "comet_ml"
    alias = "writer"
    flushes = True

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

    @property
    def run_id(self) -> str | None:
        """The experiment's key."""
        return None if self._run is None else str(self._run.get_key())

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `comet_ml.start` that continue an experiment."""
        # Offline, the part before may be uploaded later, or never have been written.
        return {"experiment_key": run_id, "mode": "get_or_create"}

    def _configure(self, values: dict[str, Any]) -> None:
        self.tracker.log_parameters(values)  # Comet joins the names of nested ones

    def _write(self, values: Values, step: int | None, **kwargs: Any) -> None:
        if step is not None:
            self.tracker.set_step(step)
        if values.numbers:
            self.tracker.log_metrics(values.numbers, step=step, **kwargs)
        for name, text in values.texts.items():
            self.tracker.log_other(name, text)
        for name, found in values.images.items():
            for image in found:
                # Comet would stretch bytes to its full range.
                is_bytes = str(getattr(image, "dtype", "")) == "uint8"
                options = {"image_minmax": (0, 255), **kwargs} if is_bytes else kwargs
                self.tracker.log_image(image, name=name, step=step, **options)
