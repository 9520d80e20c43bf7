"""Rows of W&B: closed by `flush`, and none of the values lost."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel.trackers import wandb_file
from accel.trackers.wandb_file import BLOCK, HEADER, Rows, _records


class Run:
    """Takes rows as wandb does: closed by a later step, and none for a closed step."""

    def __init__(self, **settings: Any) -> None:
        self.step = 0
        self.settings = SimpleNamespace(mode="offline", sync_file="missing", **settings)
        self.rows: dict[int, dict[str, object]] = {}
        self.refused: list[tuple[dict[str, object], int]] = []

    def log(
        self, values: dict[str, object], step: int | None = None, commit: bool | None = None
    ) -> None:
        row = self.step if step is None else step
        if row < self.step:
            self.refused.append((values, row))
            return
        self.rows.setdefault(row, {}).update(values)
        is_closed = step is None if commit is None else commit
        self.step = row + 1 if is_closed else row


def test_flush_closes_the_open_row_once() -> None:
    run = Run()
    rows = Rows(run)
    rows.flush()
    rows.log({"loss": 1}, 3)
    assert run.step == 3
    for _ in range(2):
        rows.flush()
        assert run.step == 4
    rows.log({"loss": 2}, 4, commit=True)
    rows.flush()
    rows.log({"loss": 3}, None)
    rows.flush()
    assert run.rows == {3: {"loss": 1}, 4: {"loss": 2}, 5: {"loss": 3}}
    rows.log({"part": 4}, None, commit=False)
    rows.flush()
    assert (run.step, run.rows[6], run.refused) == (7, {"part": 4}, [])


def test_values_after_flush_are_in_the_next_row(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    rows = Rows(run)
    rows.log({"loss": 2}, 2)
    rows.flush()
    assert not caplog.records
    rows.log({"val": 2}, 2)
    rows.log({"loss": 3}, 3)
    rows.log({"val": 3}, 3)  # would replace that of step 2
    rows.log({"loss": 10}, 10)
    rows.log({"val": 10}, 10)
    assert run.rows == {
        2: {"loss": 2},
        3: {"val": 2, "loss": 3},
        4: {"val": 3},
        10: {"loss": 10, "val": 10},
    }
    (record,) = caplog.records
    for part in ("val of step 2", "at the next step", "before save_state"):
        assert part in record.getMessage()


def test_states_at_each_step_lose_nothing() -> None:
    run = Run()
    rows = Rows(run)
    for step in range(5):
        rows.log({"loss": step}, step)
        rows.flush()
        rows.log({"val": step}, step)
        rows.log({"more": step}, step)
    for name in ("loss", "val", "more"):
        assert [row[name] for row in run.rows.values() if name in row] == [0, 1, 2, 3, 4]
    assert run.refused == []


def test_a_value_of_an_older_step_replaces_none() -> None:
    run = Run()
    rows = Rows(run)
    rows.log({"loss": 2}, 2)
    rows.flush()
    rows.log({"loss": 3}, 3)
    rows.log({"loss": 2}, 2)  # of which wandb warns
    assert (run.rows[3], run.refused) == ({"loss": 3}, [({"loss": 2}, 2)])


def test_a_row_that_wandb_refused_is_not_closed() -> None:
    run = Run()
    run.step = 5  # of a run that the server continues
    rows = Rows(run)
    rows.log({"loss": 3}, 3)
    rows.flush()
    assert (run.step, run.rows) == (5, {})


@pytest.mark.parametrize("interval", [{}, {wandb_file.INTERVAL: 15.0}, {wandb_file.INTERVAL: 0.0}])
def test_a_file_that_is_written_too_seldom_is_told_of(
    interval: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(**interval)
    run.settings.sync_file = str(tmp_path / "run.wandb")
    Path(run.settings.sync_file).touch()
    rows = Rows(run)
    rows.log({"loss": 3}, 3)
    wandb_file.logger._seen.clear()
    rows.flush()
    assert "x_transaction_log_flush_interval" in caplog.text
    assert "wandb.init(settings=" in caplog.text


def test_records_span_blocks() -> None:
    contents = [b"a" * 10, b"b" * (BLOCK - HEADER - 20), b"c" * (2 * BLOCK), b"d"]
    data = b"\0" * HEADER
    for content in contents:
        rest, is_first = content, True
        while is_first or rest:
            left = BLOCK - len(data) % BLOCK
            if left < HEADER:
                data += b"\0" * left
                continue
            part, rest = rest[: left - HEADER], rest[left - HEADER :]
            kind = (1 if is_first else 4) if not rest else (2 if is_first else 3)
            data += struct.pack("<IHB", 0, len(part), kind) + part
            is_first = False
    assert [content for _, content in _records(data, HEADER)] == contents
    assert [content for _, content in _records(data[:-1], HEADER)] == contents[:-1]
    # From the second block on, the record that began in the first is passed over.
    assert [content for _, content in _records(data[BLOCK:], 0)] == contents[2:]
