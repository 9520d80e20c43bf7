"""What a person sees: on a terminal, in a log file, and on other ranks."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from runner.training.console import Display, clock, number, short

ROWS = [("directory", "runs/digits/1"), ("device", "cpu [2] · fp32")]


def display(terminal: bool, width: int = 80, enabled: bool = True) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=width, height=40, legacy_windows=False
    )
    return Display(enabled, console, refresh_seconds=0.0), out


def run(shown: Display, num_steps: int = 20) -> None:
    """Show a short run."""
    shown.header("digits", ROWS)
    shown.start(0, num_steps, 2)
    for step in range(1, num_steps + 1):
        shown.step(step, 1 + step // 11)
        if step % 10 == 0:
            shown.values({"loss": 1 / step, "lr": 1e-3, "samples_per_second": 12_345.0})
            shown.evaluating("validation", 1, 2)
            shown.evaluation(
                "validation", step, step // 10, {"accuracy": 0.5}, "best" * (step == 10)
            )
    shown.note("a [bold]note[/bold]")
    shown.text("sample", "def f():\n    return [x]")
    shown.final("digits", [("best", "accuracy 0.5 at step 10")])


def plain(text: str) -> str:
    """Return terminal output without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_log_file_gets_plain_lines() -> None:
    shown, out = display(terminal=False)
    run(shown)
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert lines[:3] == ["digits", "  directory  runs/digits/1", "  device     cpu [2] · fp32"]
    progress = [line for line in lines if line.startswith("step")]
    assert progress[0].startswith("step 10/20  epoch 1/2  loss 0.1000  lr 1.0e-03  12.3k samples/s")
    evaluations = [line for line in lines if line.startswith("validation")]
    assert evaluations == [
        "validation  step 10  epoch 1/2  accuracy 0.5000  best",
        "validation  step 20  epoch 2/2  accuracy 0.5000",
    ]
    assert "a [bold]note[/bold]" in lines
    assert lines[-5:] == ["sample:", "def f():", "    return [x]", "digits", lines[-1]]
    assert "accuracy 0.5 at step 10" in lines[-1]


def test_without_a_terminal_every_log_point_and_evaluation_is_a_line() -> None:
    shown, out = display(terminal=False)
    shown.start(0, 100, 1)
    for step in range(1, 101):
        shown.step(step, 1)
        shown.values({"loss": 1.0})
        shown.evaluation("validation", step, 1, {"loss": 1.0})
    lines = out.getvalue().splitlines()
    assert sum(line.startswith("step") for line in lines) == 100
    assert sum(line.startswith("validation") for line in lines) == 100


@pytest.mark.parametrize(("width", "unit"), [(80, "12.3k/s"), (120, "12.3k samples/s")])
def test_a_terminal_gets_one_line_that_fits(width: int, unit: str) -> None:
    shown, out = display(terminal=True, width=width)
    run(shown)
    drawn = [line for line in re.split(r"[\r\n]", plain(out.getvalue())) if line.strip()]
    assert max(map(len, drawn)) <= width
    progress = [line for line in drawn if line.startswith("step")]
    shown_last = next(line for line in reversed(progress) if "loss" in line)
    for part in ("step 20/20", "epoch 2/2", "loss 0.0500", "lr 1.0e-03", unit, "ETA 0:00"):
        assert part in shown_last
    assert any("validation: batch 1/2" in line for line in progress)
    assert any(line.startswith("validation") and line.rstrip().endswith("best") for line in drawn)
    assert any("runs/digits/1" in line for line in drawn)


def test_a_terminal_is_drawn_only_when_it_is_time() -> None:
    shown, out = display(terminal=True)
    shown._every = 3600.0
    shown.start(0, None, None)
    shown.step(1, 1)
    size = len(out.getvalue())
    for step in range(2, 100):
        shown.step(step, 1)
    assert len(out.getvalue()) == size
    shown.close()


def test_no_thread_draws_and_closing_twice_is_fine() -> None:
    before = threading.active_count()
    shown, _ = display(terminal=True)
    shown.start(0, 10, None)
    shown.step(1, 1)
    assert threading.active_count() == before
    shown.close()
    shown.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_show_nothing(terminal: bool) -> None:
    shown, out = display(terminal, enabled=False)
    run(shown)
    assert out.getvalue() == ""


def test_the_end_of_a_run_of_unknown_length_is_not_guessed() -> None:
    shown, _ = display(terminal=False)
    shown.start(0, None, None)
    shown.step(5, 1)
    assert "ETA" not in shown.status()
    assert shown.status() == "epoch 1"


def test_in_a_narrow_place_the_end_stays_and_the_rate_goes() -> None:
    shown, out = display(terminal=True, width=60)
    shown.start(0, 1_000_000, 1000)
    shown.step(123_456, 123)
    shown.values({"loss": 1e-5, "lr": 1e-3, "samples_per_second": 12_345.0})
    shown.close()
    drawn = [line for line in re.split(r"[\r\n]", plain(out.getvalue())) if "loss" in line]
    assert max(map(len, drawn)) <= 60
    assert "loss 1.000e-05" in drawn[-1]
    assert "ETA" in drawn[-1]
    assert "lr" not in drawn[-1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98765, "0.9877"),
        (1.0, "1.0000"),
        (13.0, "13"),
        (7, "7"),
        (1e-5, "1.000e-05"),
        (float("nan"), "nan"),
    ],
)
def test_metrics_have_four_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(3.21, "3.2"), (99.96, "100"), (999.7, "1.0k"), (35_123_456, "35.1M")]
)
def test_rates_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0:00"), (61.4, "1:01"), (3_661, "1:01:01")])
def test_durations_are_read_as_on_a_clock(value: float, text: str) -> None:
    assert clock(value) == text


def test_there_is_no_epoch_behind_the_last() -> None:
    shown, out = display(terminal=False)
    shown.start(19, 20, 2)
    shown.step(20, 3)
    shown.values({"loss": 1.0})
    shown.evaluation("validation", 20, 3, {"accuracy": 0.5})
    assert "epoch 3" not in out.getvalue()
    assert out.getvalue().count("epoch 2/2") == 2


def test_the_remaining_time_knows_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("runner.training.console.time.monotonic", lambda: now[0])
    for total, seconds, expected in (
        (1000, 60.0, "0:50"),
        (20, 60.0, "0:10"),
        (None, 60.0, "0:50"),
    ):
        now[0] = 100.0
        shown, _ = display(terminal=False)
        shown.start(0, total, None, seconds)
        now[0] = 110.0
        shown.step(10, 1)
        assert f"ETA {expected}" in shown.status()
