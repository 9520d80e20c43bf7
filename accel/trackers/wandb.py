"""Weights & Biases.

``mode="offline"``, or the variable ``WANDB_MODE=offline``, writes files for ``wandb sync``.

Source: https://docs.wandb.ai/ref/python/sdk/functions/init
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel.trackers.base import LibraryTracker, detached, images_of, on_main_process, plain
from accel.trackers.wandb_file import Rows, frequent_writes


class WandBTracker(LibraryTracker):
    """Logs to a run of Weights & Biases.

    Args:
        run_name: name of the W&B project.
        kwargs: for `wandb.init`.
    """

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self._rows: Rows | None = None

    def _open(self) -> object:
        import wandb

        settings = frequent_writes(self._kwargs.get("settings"))
        own = {} if settings is None else {"settings": settings}
        run = wandb.init(**{"project": self.run_name, **self._kwargs, **own})
        self._rows = Rows(run)
        return run

    def _close(self, run: Any) -> None:
        run.finish(exit_code=1 if self.failed else None)

    @property
    def run_id(self) -> str | None:
        """The run's id."""
        return None if self._run is None else str(self._run.id)

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `wandb.init` that continue a run."""
        return {"id": run_id, "resume": "allow"}

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Record hyper-parameters, nested as they are."""
        self.tracker.config.update(plain(values), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Record numbers, text, or anything else that `wandb.log` takes."""
        self._record(detached(values), step, **kwargs)

    def _record(self, values: dict[str, object], step: int | None, **kwargs: object) -> None:
        assert self.tracker is not None
        assert self._rows is not None
        self._rows.log(values, step, **kwargs)

    @on_main_process
    def flush(self) -> None:
        """Close the row of the newest step, and wait until the run's file has it."""
        if self._run is not None and self._rows is not None:
            self._rows.flush()

    @on_main_process
    def log_images(
        self, values: dict[str, object], step: int | None = None, **kwargs: object
    ) -> None:
        """Record images.

        Args:
            values: by name: images, as `images_of` takes them.
            step: optimizer step.
            kwargs: for `wandb.Image`.
        """
        import wandb

        images: dict[str, object] = {
            name: [wandb.Image(image, **kwargs) for image in images_of(found)]
            for name, found in values.items()
        }
        self._record(images, step)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[object]] | None = None,
        dataframe: object = None,
        step: int | None = None,
        **kwargs: object,
    ) -> None:
        """Record a table, given as columns and rows or as a data frame.

        Args:
            table_name: its name.
            columns: names of the columns.
            data: rows.
            dataframe: of pandas; takes the place of `columns` and `data`.
            step: optimizer step.
            kwargs: for the run's `log`.
        """
        import wandb

        columns = None if columns is None else list(columns)
        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self._record({table_name: table}, step, **kwargs)
