"""The help and the README list the exit codes of `runner.exit_codes`."""

from __future__ import annotations

from pathlib import Path

from runner import exit_codes
from runner.cli import help

README = Path(__file__).resolve().parents[3] / "README.md"


def test_every_exit_code_has_a_meaning() -> None:
    codes = {value for value in vars(exit_codes).values() if isinstance(value, int)}
    assert set(exit_codes.MEANINGS) == codes


def test_the_help_lists_the_exit_codes() -> None:
    for code, meaning in exit_codes.MEANINGS.items():
        assert f"  {code:<4} {meaning}\n" in help.text()


def test_the_readme_lists_the_exit_codes() -> None:
    text = " ".join(README.read_text(encoding="utf-8").replace("`", "").split())
    listed = "; ".join(f"{code} {meaning}" for code, meaning in exit_codes.MEANINGS.items())
    assert f"Exit codes: {listed}." in text
