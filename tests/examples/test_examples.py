"""E1, R1, R2: the three training scripts reach their figures on 1 and 2 processes, and resumed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.examples.launching import Run, number_after, outputs

pytestmark = pytest.mark.timeout(900)  # some seconds alone; the machine may be shared


@pytest.mark.slow  # the resumed training starts as many processes
def test_classification(tmp_path: Path) -> None:
    def run(name: str, processes: int | None) -> Run:
        arguments = ("--epochs", "5", "--output-dir", str(tmp_path / name))
        return Run("classification", arguments, processes)

    uneven = ("--epochs", "2", "--gradient-accumulation-steps", "2")  # 39 batches an epoch
    accumulated = Run("classification", (*uneven, "--output-dir", str(tmp_path / "own")), None)
    plain, one, two, own = outputs(run("plain", None), run("one", 1), run("two", 2), accumulated)
    assert plain == one  # torchrun changes nothing
    assert number_after("test accuracy", own) > 0.8
    for lines in (one, two):
        assert len(lines) == 6
        assert number_after("validation accuracy", lines) > 0.92
        assert number_after("test accuracy", lines) > 0.92
    # The same batches, split over two: the same training up to rounding.
    for word in ("loss", "validation accuracy", "test accuracy"):
        assert number_after(word, two) == pytest.approx(number_after(word, one), abs=0.02)
    names = [sorted(load_file(tmp_path / n / "best" / "model.safetensors")) for n in ("one", "two")]
    assert names[0] == names[1]
    assert "head.weight" in names[0]


@pytest.mark.slow  # the other examples start as many processes
def test_language_model() -> None:
    # 66 batches of 16, of which 64 make whole steps of 4.
    small = ("--limit", "1174", "--dim", "32", "--epochs", "2", "--lr", "5e-3", "--context", "64")
    plain, one, two = outputs(*(Run("language_model", small, count) for count in (None, 1, 2)))
    assert plain == one
    for lines in (one, two):
        assert len(lines) == 2
        first, last = (float(re.findall(r"([\d.]+) bits", line)[0]) for line in lines)
        assert 2.0 < last < first < 8.0  # a byte without a model has 8 bits
        assert last < 4.9
    # Normalised by the bytes of the whole step, accumulated or on another process.
    assert number_after("last loss", two) == pytest.approx(number_after("last loss", one), abs=2e-3)
    bits = [float(lines[-1].split()[-4]) for lines in (one, two)]
    assert bits[0] == pytest.approx(bits[1], abs=2e-3)


SMALL = ("--epochs", "4")
CRASH = ("--crash-after", "27")


def resume_arguments(folder: Path, *more: str) -> tuple[str, ...]:
    return (*SMALL, "--project-dir", str(folder), *more)


@pytest.mark.slow  # three processes import PyTorch; test_end_to_end.py resumes a run
def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    crashed = Run("checkpoint_resume", resume_arguments(tmp_path / "cut", *CRASH))()
    assert (crashed.returncode, crashed.stdout) == (-signal.SIGKILL, "")
    whole, again = outputs(
        Run("checkpoint_resume", resume_arguments(tmp_path / "whole"), 1),
        Run("checkpoint_resume", resume_arguments(tmp_path / "cut", "--resume")),
    )
    assert again == ["resumed after step 20: epoch 1, batch 8 of 32", *whole]
    assert whole[0].startswith("64 steps: error 0.")


@pytest.mark.slow
def test_a_resumed_training_of_two_processes_ends_with_the_same_bits(tmp_path: Path) -> None:
    crashed = Run("checkpoint_resume", resume_arguments(tmp_path / "cut", *CRASH), 2)()
    assert (crashed.returncode, crashed.stdout) == (1, "")
    whole, again = outputs(
        Run("checkpoint_resume", resume_arguments(tmp_path / "whole"), 2),
        Run("checkpoint_resume", resume_arguments(tmp_path / "cut", "--resume"), 2),
    )
    assert again == ["resumed after step 20: epoch 2, batch 8 of 16", *whole]
    assert whole[0].startswith("32 steps: error 0.")
