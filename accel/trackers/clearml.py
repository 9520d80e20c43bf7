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
from accel.trackers.base import (
    LibraryTracker,
    images_of,
    on_main_process,
    plain,
    scalars_and_texts,
)

logger = get_logger(__name__)
SPLITS = ("train", "validation", "eval", "test")


class ClearMLTracker(LibraryTracker):
    """Logs to a task of ClearML; to the current one, where the script has initialized it.

    The variables `CLEARML_PROJECT` and `CLEARML_TASK` override the arguments.

    Args:
        run_name: name of the task, and of the ClearML project where `kwargs` give none.
        kwargs: for `Task.init`.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self._is_own = True
        self._not_finite: set[str] = set()

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

    @on_main_process
    def flush(self) -> None:
        """Write what the library's threads have yet to write."""
        if self._run is not None:
            self._run.flush()

    @property
    def run_id(self) -> str | None:
        """The task's id."""
        return None if self._run is None else str(self._run.id)

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `Task.init` that continue a task, its steps as they are."""
        return {"reuse_last_task_id": run_id, "continue_last_task": 0}

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Record hyper-parameters; ClearML joins the names of nested ones."""
        self.tracker.connect(plain(values))

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Record numbers and text.

        ClearML records NaN and infinity as 0, or as `clearml.Logger.set_reporting_nan_value` and
        `set_reporting_inf_value` say; while they say 0, such a value is in the text log instead,
        with a warning.

        Args:
            values: by name: ``<split>/<name>`` and ``<split>_<name>`` are the series of one chart.
            step: optimizer step; None: single values of the task.
            kwargs: for the logger's `report_scalar` or `report_single_value`.
        """
        numbers, texts = scalars_and_texts(values)
        report = self.tracker.get_logger()
        for name, value in numbers.items():
            if not math.isfinite(value) and _is_zero_there(value):
                self._tell_of_not_finite(name, value, step)
                texts[name] = str(value)
            elif step is None:
                report.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _chart(name)
                report.report_scalar(
                    title=title, series=series, value=value, iteration=step, **kwargs
                )
        for name, text in texts.items():
            report.report_text(f"{name}: {text}" if step is None else f"{step}: {name}: {text}")

    def _tell_of_not_finite(self, name: str, value: float, step: int | None) -> None:
        if name not in self._not_finite:
            logger.warning(
                "clearml: %s=%s (step %s) is no point of its series, as others of that name that "
                "are not finite: ClearML would record 0. They are in the text log; or set "
                "clearml.Logger.set_reporting_nan_value and set_reporting_inf_value.",
                name,
                value,
                step,
            )
        self._not_finite.add(name)

    @on_main_process
    def log_images(
        self, values: dict[str, object], step: int | None = None, **kwargs: object
    ) -> None:
        """Record images.

        Args:
            values: by name: images, as `images_of` takes them.
            step: optimizer step.
            kwargs: for the logger's `report_image`.
        """
        report = self.tracker.get_logger()
        for name, found in values.items():
            title, series = _chart(name)
            images = images_of(found)
            for index, image in enumerate(images):
                place = series if len(images) == 1 else f"{series}_{index}"
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


def _is_zero_there(value: float) -> bool:
    """Return whether ClearML records a value that is not finite as 0, its default."""
    try:
        from clearml.backend_interface.metrics.events import MetricsEventAdapter
    except ImportError:
        return True
    kind = "nan" if math.isnan(value) else "inf"
    return not getattr(MetricsEventAdapter, f"default_{kind}_value", 0.0)


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
