"""ClearML.

The variable ``CLEARML_OFFLINE_MODE=1`` writes a session that ``Task.import_offline_session``
uploads.

Source: https://clear.ml/docs/latest/docs/references/sdk/task
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from accel.logging import get_logger
from accel.machine import env
from accel.trackers.base import LibraryTracker, Values, numbered, on_main_process

logger = get_logger(__name__)
SPLITS = ("train", "validation", "eval", "test")


class ClearMLTracker(LibraryTracker):
    """Logs to a task of ClearML; to the current one, where the script has initialized it.

    Values ``<split>/<name>`` and ``<split>_<name>`` are the series of one chart; without a step
    they are single values of the task. The variables `CLEARML_PROJECT` and `CLEARML_TASK` override
    the arguments.

    Args:
        run_name: name of the task, and of the ClearML project where `kwargs` give none.
        kwargs: for `Task.init`.
    """

    name = "clearml"
    alias = "task"
    flushes = True

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._is_own = True

    def _open(self) -> object:
        from clearml import Task

        current = Task.current_task()
        if current is not None:
            self._is_own = False
            return current
        names = {
            "project_name": env.read("CLEARML_PROJECT") or self.run_name,
            "task_name": env.read("CLEARML_TASK") or self.run_name,
        }
        return Task.init(**{**names, **self._kwargs})

    def _close(self, run: Any) -> None:
        if self._is_own:
            if self.failed:
                run.mark_failed(status_message="the run ended with an exception")
            run.close()

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `Task.init` that continue a task, its steps as they are."""
        return {"reuse_last_task_id": run_id, "continue_last_task": 0}

    def _configure(self, values: dict[str, Any]) -> None:
        self.tracker.connect(values)  # ClearML joins the names of nested ones

    def _write(self, values: Values, step: int | None, **kwargs: Any) -> None:
        report = self.tracker.get_logger()
        said = dict(values.texts)
        for name, value in values.numbers.items():
            if not math.isfinite(value):
                logger.warning_once(
                    "clearml: values of %s that are not finite are in the text log alone: ClearML "
                    "would record 0.",
                    name,
                )
                said[name] = str(value)
            elif step is None:
                report.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _chart(name)
                report.report_scalar(
                    title=title, series=series, value=value, iteration=step, **kwargs
                )
        for name, text in said.items():
            report.report_text(f"{name}: {text}" if step is None else f"{step}: {name}: {text}")
        for name, found in values.images.items():
            title, series = _chart(name)
            for place, image in numbered(series, found):
                report.report_image(
                    title=title, series=place, iteration=step, **_image(image), **kwargs
                )

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
            kwargs: for the logger's `report_table`.

        Raises:
            ValueError: if there are neither rows nor a data frame.
        """
        table = dataframe
        if table is None:
            if data is None:
                raise ValueError("log_table: give data (rows), or dataframe.")
            rows = [list(row) for row in data]
            table = rows if columns is None else [list(columns), *rows]
        title, series = _chart(table_name)
        report = self.tracker.get_logger()
        report.report_table(title=title, series=series, iteration=step, table_plot=table, **kwargs)


def _chart(name: str) -> tuple[str, str]:
    """Return (title, series) of a value: those of several splits share a chart."""
    for split in SPLITS:
        for separator in "/_":
            if name.startswith(split + separator):
                return name[len(split) + 1 :], split
    return name, name


def _image(image: object) -> dict[str, object]:
    """Return the argument of `report_image` for an image in memory or a path."""
    return {"local_path": image} if isinstance(image, str) else {"image": image}
