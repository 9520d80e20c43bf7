"""The text of --help (C1, E6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import cli
from runner.cli import help
from tests.helpers import write_file

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_help_names_groups_keys_codes_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "precision     bf16 | bf16_weights | fp16 | fp8_te | fp8_torchao | no*" in out
    for expected in ("trainer.max_steps", "--multirun", "runner eval RUN_DIR", "75   stopped by"):
        assert expected in out
    assert max(len(line) for line in out.splitlines()) <= help.WIDTH


def test_help_names_the_projects_own_files(tmp_path: Path) -> None:
    write_file(tmp_path / "conf" / "model" / "tiny.yaml", "name: tiny\n")
    assert " | tiny\n" in help.text()
