"""DVCLive: metrics as files beside a Git repository.

Source: https://dvc.org/doc/dvclive/live
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel.logging import get_logger
from accel.trackers.base import LibraryTracker, Values, numbered, on_main_process

logger = get_logger(__name__)


class DVCLiveTracker(LibraryTracker):
    """Logs into a folder of DVCLive.

    Args:
        run_name: unused: DVCLive names folders (`dir`) and experiments (`exp_name`) in `kwargs`.
        live: an open `dvclive.Live`, used as it is.
        kwargs: for `dvclive.Live`.
    """

    name = "dvclive"
    id_path = "dir"
    alias = "live"

    def __init__(self, run_name: str | None = None, live: object = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._live: Any = live
        self._config: dict[str, Any] | None = None  # stored when the folder is opened

    def _open(self) -> object:
        live = self._folder() if self._live is None else self._live
        if self._config is not None:
            live.log_params(self._config)
        return live

    def _folder(self) -> Any:
        from dvclive import Live

        folder = Path(str(self._kwargs.get("dir", "dvclive")))
        if not self._kwargs.get("resume") and (folder / "plots" / "metrics").is_dir():
            logger.warning(
                "dvclive: %s held the metrics of an earlier run, which DVCLive removes for a new "
                "one. Give init_kwargs={'dvclive': {'dir': …}}, or resume=True to append to them.",
                folder,
            )
        return Live(**self._kwargs)

    @on_main_process
    def start(self) -> None:
        """Leave the folder as it is until there is something to log.

        DVCLive empties it for a new run, and `load_state` may yet say that this is none.
        """

    @on_main_process
    def flush(self) -> None:
        """Open the folder, so that checkpoints know it."""
        assert self.tracker is not None

    @on_main_process
    def finish(self) -> None:
        """Close the folder; one in which nothing is logged gets the hyper-parameters first."""
        if self._config is not None and not self._finished and not self.failed:
            self.flush()
        super().finish()

    @on_main_process
    def discard(self) -> None:
        """Leave the folder as it is, where it is not opened yet."""
        self._config = None
        self.finish()

    def _close(self, run: Any) -> None:
        run.end()

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `dvclive.Live` that append to a folder."""
        return {"dir": run_id, "resume": True}

    def _configure(self, values: dict[str, Any]) -> None:
        self._config = values
        if self._run is not None:
            self._run.log_params(values)

    def _write(self, values: Values, step: int | None, **kwargs: Any) -> None:
        live = self.tracker
        if step is not None:
            live.step = step
        for name, value in {**values.numbers, **values.texts}.items():
            live.log_metric(name, value, **kwargs)
        for name, found in values.images.items():
            for file, image in numbered(name, found):
                live.log_image(f"{file}.png", image, **kwargs)
        if not values.images:
            live.next_step()
