"""SwanLab.

``mode="offline"`` writes files that ``swanlab sync`` uploads, ``mode="local"`` files for its own
dashboard.

Source: https://docs.swanlab.cn/en/api/py-init.html
"""

from __future__ import annotations

import inspect
from typing import Any

from accel.trackers.base import LibraryTracker, Values

OLDER_ARGUMENTS = ("experiment_name", "notes", "logdir")  # of `swanlab.init`


class SwanLabTracker(LibraryTracker):
    """Logs to an experiment of SwanLab.

    Args:
        run_name: name of the SwanLab project.
        kwargs: for `swanlab.init`.
    """

    name = "swanlab"
    alias = "run"

    def _open(self) -> object:
        import swanlab

        # It ignores arguments that it does not know.
        parameters = inspect.signature(swanlab.init).parameters.values()
        known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        unknown = [name for name in self._kwargs if name not in (*known, *OLDER_ARGUMENTS)]
        if known and unknown:
            raise TypeError(f"swanlab.init() got an unexpected keyword argument {unknown[0]!r}")
        return swanlab.init(**{"project": self.run_name, **self._kwargs})

    def _close(self, run: Any) -> None:
        run.finish(state="crashed" if self.failed else "success")

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `swanlab.init` that continue an experiment."""
        return {"id": run_id, "resume": "allow"}

    def _configure(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(values)

    def _write(self, values: Values, step: int | None, **kwargs: Any) -> None:
        import swanlab

        if values.images:
            images = values.images.items()
            shown = {
                name: [swanlab.Image(one, **kwargs) for one in found] for name, found in images
            }
            self.tracker.log(shown, step=step)
        else:
            texts = {name: swanlab.Text(text) for name, text in values.texts.items()}
            self.tracker.log({**values.numbers, **texts}, step=step, **kwargs)
