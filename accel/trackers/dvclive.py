"""DVCLive: metrics as files beside a Git repository.

Source: https://dvc.org/doc/dvclive/live
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from accel.logging import get_logger
from accel.trackers.base import (
    LibraryTracker,
    RecordedSteps,
    images_of,
    on_main_process,
    plain,
    scalars_and_texts,
)

logger = get_logger(__name__)


class DVCLiveTracker(LibraryTracker):
    """Logs into a folder of DVCLive.

    Args:
        run_name: unused: DVCLive names folders (`dir`) and experiments (`exp_name`) in `kwargs`.
        live: an open `dvclive.Live`, used as it is.
        kwargs: for `dvclive.Live`.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: object = None, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self._live: Any = live
        self._kwargs = kwargs
        self._config: dict[str, object] | None = None  # stored when the folder is opened
        self._recorded = RecordedSteps(self.name, self._steps)

    def _open(self) -> object:
        live = self._folder() if self._live is None else self._live
        if self._config is not None:
            live.log_params(plain(self._config))
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

    def _steps(self, name: str) -> list[int]:
        """Return the steps of a value that a continued run has in its file."""
        path = Path(f"{self.tracker.dir}/plots/metrics/{name}.tsv")
        if not self._kwargs.get("resume") or not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return [int(row["step"]) for row in csv.DictReader(file, delimiter="\t")]

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

    @property
    def run_id(self) -> str | None:
        """The folder."""
        return None if self._run is None else str(self._run.dir)

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `dvclive.Live` that append to a folder."""
        return {"dir": run_id, "resume": True}

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Record hyper-parameters in ``params.yaml``, nested as they are."""
        self._config = values
        if self._run is not None:
            self._run.log_params(plain(values))

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Record numbers and text, and make the step's summary.

        A value of a continued run is kept where it has that step already.

        Args:
            values: by name; nested ones are named ``outer/inner``.
            step: optimizer step; None: the next one.
            kwargs: for `Live.log_metric`.
        """
        live = self.tracker
        if step is not None:
            live.step = step
        numbers, texts = scalars_and_texts(values)
        for name, value in self._recorded.missing({**numbers, **texts}, step).items():
            live.log_metric(name, value, **kwargs)
        live.next_step()

    @on_main_process
    def log_images(
        self, values: dict[str, object], step: int | None = None, **kwargs: object
    ) -> None:
        """Record images as ``<name>.png``, several as ``<name>_<index>.png``.

        Args:
            values: by name: images, as `images_of` takes them.
            step: optimizer step.
            kwargs: for `Live.log_image`.
        """
        live = self.tracker
        if step is not None:
            live.step = step
        for name, found in values.items():
            images = images_of(found)
            for index, image in enumerate(images):
                file = f"{name}.png" if len(images) == 1 else f"{name}_{index}.png"
                live.log_image(file, image, **kwargs)
