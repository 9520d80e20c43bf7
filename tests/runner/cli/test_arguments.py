"""Flags of the command line (C2)."""

from __future__ import annotations

import pytest

from runner import cli
from runner.cli.arguments import take_imports

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_flags_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["seed=3", "--package", "seed", "--cfg", "job"]) == 0
    assert capsys.readouterr().out == "3\n"


@pytest.mark.parametrize(
    ("arguments", "imports", "rest"),
    [
        (["a=1", "--import", "x", "-m"], ["x"], ["a=1", "-m"]),
        (["--import=x,y", "eval", "RUN", "--split", "test"], ["x", "y"], ["eval", "RUN"]),
        (["a=1"], [], ["a=1"]),
    ],
)
def test_imports_are_taken_out(arguments: list[str], imports: list[str], rest: list[str]) -> None:
    found, left = take_imports(arguments)
    assert found == imports
    assert left[: len(rest)] == rest
