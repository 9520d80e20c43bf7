"""R8: run.log holds what the console shows, as text."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from runner.runs.directory import RUN_LOG
from runner.training import run_log
from runner.training.console import Display
from runner.training.run_log import RunLog


def lines(folder: Path) -> list[str]:
    return (folder / RUN_LOG).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (["a", "b\n", "c"], ["ab", "c"]),
        (["\x1b[1;31mred\x1b[0m\ttab\n"], ["red\ttab"]),
        (["10%\r", "20%\r", "30%\ndone\n"], ["30%", "done"]),
        (["line\r\nnext\r\n"], ["line", "next"]),
        (["\x1b]0;title\x07text\x08\n\n"], ["text", ""]),
        (["bar 1", "\r\x1b[2Kbar 2", "\r\x1b[2Kprinted\nbar 2"], ["printed", "bar 2"]),
        (["\r\x1b[2Kbar 9\n", "\r\x1b[1A\x1b[2K", "end\n"], ["bar 9", "end"]),
        (["größer \ud800\n"], ["größer ?"]),
    ],
)
def test_text_is_kept_as_it_was_last_seen(
    written: list[str], expected: list[str], tmp_path: Path
) -> None:
    log = RunLog(tmp_path / RUN_LOG)
    for text in written:
        log.feed(1, text)
    log.close()
    assert lines(tmp_path) == expected


def test_both_streams_are_copied_and_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stdout, sys.stderr
    with run_log.captured(tmp_path, "python -m runner"):
        print("out")
        print("err", file=sys.stderr)
        print("no end", end="")
    assert (sys.stdout, sys.stderr) == before
    first, *rest = lines(tmp_path)
    assert first.startswith(f"--- process {os.getpid()}, ")
    assert first.endswith(" python -m runner")
    assert rest == ["out", "err", "no end"]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("out\nno end", "err\n")


def test_a_resumed_run_adds_to_it(tmp_path: Path) -> None:
    for word in ("first", "second"):
        with run_log.captured(tmp_path):
            print(word)
    assert [line for line in lines(tmp_path) if not line.startswith("---")] == ["first", "second"]


def test_a_bar_on_a_terminal_leaves_lines_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with run_log.captured(tmp_path):
        console = Console(force_terminal=True, width=100, legacy_windows=False)
        shown = Display(True, console, refresh_seconds=0.0)
        shown.start(0, 20, 1)
        for step in (10, 20):
            shown.step(step, 1)
            shown.values({"loss": 1 / step})
        print("the user's line")
        shown.evaluation("validation", 20, 1, {"loss": 0.5})
        shown.close()
    text = lines(tmp_path)
    assert not any("\x1b" in line or "\r" in line for line in text)
    for line in ("step 10/20  epoch 1/1  loss 0.1000", "step 20/20  epoch 1/1  loss 0.0500"):
        assert f"{line}  ETA 0:00" in text
    assert "the user's line" in text
    assert any(line.startswith("validation") for line in text)


def test_a_full_disk_ends_the_log_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RUN_LOG).symlink_to("/dev/full")
    with run_log.captured(tmp_path):
        print("goes on")
        print("and on")
    shown = capsys.readouterr().out
    assert shown.endswith("goes on\nand on\n")


def test_named_loggers_speak_and_are_silent_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    for name in ("own.levels", "other.levels"):
        monkeypatch.setattr(logging.getLogger(name), "_cache", {})
    logger, other = logging.getLogger("own.levels"), logging.getLogger("other.levels")
    root = logging.getLogger()
    before = root.level, list(root.handlers), logger.level
    with run_log.log_levels_applied({"own.levels": "DEBUG"}):
        logger.debug("heard")
        other.debug("not heard")
    assert (root.level, list(root.handlers), logger.level) == before
    told = capsys.readouterr().err
    assert "][own.levels][DEBUG] - heard\n" in told
    assert "not heard" not in told
