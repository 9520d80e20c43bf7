"""Trackio: a database in the folder of the variable ``TRACKIO_DIR``.

Source: https://huggingface.co/docs/trackio/index
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from accel.trackers.base import (
    LibraryTracker,
    Values,
    detached,
    flatten,
    number,
    numbered,
    on_main_process,
)


class TrackioTracker(LibraryTracker):
    """Logs to a run of Trackio.

    Args:
        run_name: name of the Trackio project.
        kwargs: for `trackio.init`.
    """

    name = "trackio"
    id_path = "name"  # unique in its project
    alias = "run"

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

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `trackio.init` that continue a run."""
        return {"name": run_id, "resume": "allow"}

    def _configure(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(values)  # stored with the first values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers, nested ones under ``outer/inner``, text, or Trackio's own objects."""
        # One array would keep Trackio's thread from writing the values beside it.
        found = {
            name: value
            for name, value in detached(flatten(values)).items()
            if not isinstance(value, (torch.Tensor, np.ndarray)) or number(name, value) is not None
        }
        if found:
            self.tracker.log(found, step=step, **kwargs)

    def _write(self, values: Values, step: int | None, **kwargs: Any) -> None:
        import trackio

        for name, found in values.images.items():
            shown = [trackio.Image(image, **kwargs) for image in found]
            self.tracker.log(dict(numbered(name, shown, "/")), step=step)
