"""R8: a run shows its progress on a terminal and in a log file, on rank 0 alone."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from runner.training.console import Display

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
    assert re.match(r"step 10/20  epoch 1/2  loss 0.1000  ETA .*  12.3k samples/s  lr", progress[0])
    evaluations = [line for line in lines if line.startswith("validation")]
    assert evaluations == [
        "validation  step 10  epoch 1/2  accuracy 0.5000  best",
        "validation  step 20  epoch 2/2  accuracy 0.5000",
    ]
    assert "a [bold]note[/bold]" in lines
    assert lines[-5:] == ["sample:", "def f():", "    return [x]", "digits", lines[-1]]
    assert "accuracy 0.5 at step 10" in lines[-1]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_one_line_that_fits(width: int) -> None:
    shown, out = display(terminal=True, width=width)
    run(shown)
    drawn = [line for line in re.split(r"[\r\n]", plain(out.getvalue())) if line.strip()]
    assert max(map(len, drawn)) <= width
    progress = [line for line in drawn if line.startswith("step")]
    shown_last = next(line for line in reversed(progress) if "loss" in line)
    for part in (
        "step 20/20",
        "epoch 2/2",
        "loss 0.0500",
        "ETA 0:00",
        "12.3k samples/s",
        "lr 1.0e-03",
    ):
        assert part in shown_last
    assert any("validation: batch 1/2" in line for line in progress)
    assert any(line.startswith("validation") and line.rstrip().endswith("best") for line in drawn)
    assert any("runs/digits/1" in line for line in drawn)


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_show_nothing(terminal: bool) -> None:
    shown, out = display(terminal, enabled=False)
    run(shown)
    assert out.getvalue() == ""


def test_rates_and_what_holds_a_run_up_are_shown() -> None:
    shown, _ = display(terminal=False)
    shown.start(0, 20, 2)
    rates = {"samples_per_second": 768.0, "tokens_per_second": 98_304.0, "mfu": 0.412}
    shown.values({"loss": 0.5, **rates, "lr": 1e-3, "time/data": 0.05})
    assert shown.status() == "epoch 0/2  loss 0.5000  98.3k tokens/s  MFU 41%  lr 1.0e-03"
    held = {"time/data": 0.25, "slowest_rank": 3.0, "slowest_rank_ratio": 1.5}
    shown.values({"samples_per_second": 768.0, **held})
    assert shown.status() == "epoch 0/2  768 samples/s  data 25%  rank 3 takes 1.5×"
