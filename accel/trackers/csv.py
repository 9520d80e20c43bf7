"""One CSV file per run, without a library."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from accel.trackers.base import GeneralTracker, on_main_process, plain, scalars_and_texts

STEP = "step"


class CSVTracker(GeneralTracker):
    """Writes ``<logging_dir>/<run_name>/metrics.csv``: a row per call of `log`.

    Its first column is the step; a value of that name has the column ``step_value``, or, where a
    value has that name, one with another ``_value``. A value that appears later adds a
    column, empty in earlier rows. Rows are appended where the file exists. Hyper-parameters are in
    ``config.json`` beside it.

    Args:
        run_name: folder of the run.
        logging_dir: folder of all runs.
        purge_step: rows of this step and later ones are removed, of a run that is resumed before.
    """

    name = "csv"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str], purge_step: int | None = None
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir) / run_name / "metrics.csv"
        self._purge_step = purge_step
        self._columns: list[str] | None = None

    @property
    def tracker(self) -> Path:
        """The file's path."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Read the columns of an existing file, and remove the rows that are logged again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns, rows = self._read()
        if self._columns:  # without a last row that was cut off
            purge = self._purge_step
            self._rewrite([one for one in rows if purge is None or not is_from(one[STEP], purge)])

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Record hyper-parameters in ``config.json``, nested as they are."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain(values), indent=2) + "\n"
        self.path.with_name("config.json").write_text(text, encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Append a row: numbers, nested ones under ``outer/inner``, and text.

        Raises:
            TypeError: for any `kwargs`.
        """
        if kwargs:
            raise TypeError(f"csv: log takes no {', '.join(kwargs)}.")
        numbers, texts = scalars_and_texts(values)
        own = {**numbers, **texts}
        name = STEP
        while name in own:
            name += "_value"
        row: dict[str, object] = {STEP: "" if step is None else plain(step)}
        row |= {name if key == STEP else key: value for key, value in own.items()}
        if self._columns is None:
            self.start()
        known = self._columns or []
        new = [key for key in row if key not in known]
        if new:
            _, rows = self._read()
            self._columns = [*known, *new]
            self._rewrite([*rows, row])
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, known, restval="", lineterminator="\n").writerow(row)

    @on_main_process
    def finish(self) -> None:
        """Forget the columns: every row is in the file already."""
        self._columns = None

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Return columns and rows of the file; a last row that was cut off is left out."""
        if not self.path.is_file():
            return [], []
        with self.path.open(newline="", encoding="utf-8") as file:
            text = file.read()
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        return list(reader.fieldnames or []), list(reader)

    def _rewrite(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Replace the file with `rows`; cut off, it stays as it was."""
        partial = self.path.with_name(".metrics.csv.partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns or [], restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(self.path)


def is_from(step: str, first: int) -> bool:
    """Return whether a recorded step is `first` or later; one that is no number is not."""
    try:
        return float(step) >= first
    except ValueError:
        return False
