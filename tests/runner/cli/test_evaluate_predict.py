"""Command lines of eval and predict."""

from __future__ import annotations

from typing import Any

import pytest

from runner import cli

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_commands_get_their_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.cli import evaluate_predict

    calls: list[Any] = []

    def record(name: str, arguments: list[str]) -> int:
        calls.append((name, arguments))
        return 1

    monkeypatch.setattr(evaluate_predict, "main", record)
    assert cli.main(["predict", "RUN", "--split", "test"]) == 1
    assert calls == [("predict", ["RUN", "--split", "test"])]


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_the_help_of_a_command_ends_with_0(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--help"]) == 0
    assert f"usage: runner {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "RUN", "--split", "none"], "invalid choice: 'none'"),
        (["predict", "RUN"], "required: --output"),
        (["eval"], "required: RUN_DIR"),
    ],
)
def test_wrong_arguments_of_a_command_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
