"""Weights & Biases.

``mode="offline"``, or the variable ``WANDB_MODE=offline``, writes files for ``wandb sync``.

Source: https://docs.wandb.ai/ref/python/sdk/functions/init
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel.trackers.base import LibraryTracker, Values, detached, on_main_process


class WandBTracker(LibraryTracker):
    """Logs to a run of Weights & Biases.

    A continued run has the values that W&B has received before: it takes none for a step that it
    has already.

    Args:
        run_name: name of the W&B project.
        kwargs: for `wandb.init`.
    """

    name = "wandb"
    alias = "run"

    def _open(self) -> object:
        import wandb

        return wandb.init(**{"project": self.run_name, **self._kwargs})

    def _close(self, run: Any) -> None:
        run.finish(exit_code=1 if self.failed else None)

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `wandb.init` that continue a run."""
        return {"id": run_id, "resume": "allow"}

    def _configure(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers, text, or anything else that `wandb.log` takes."""
        self.tracker.log(detached(values), step=step, **kwargs)

    def _write(self, values: Values, step: int | None, **kwargs: Any) -> None:
        import wandb

        images = values.images.items()
        shown = {name: [wandb.Image(image, **kwargs) for image in found] for name, found in images}
        self.tracker.log(shown, step=step)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[object]] | None = None,
        dataframe: object = None,
        step: int | None = None,
        **kwargs: Any,
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
        self.tracker.log({table_name: table}, step=step, **kwargs)
