"""Fresh interpreters find the runner before the user's folder, and the user's code behind it.

Holds C4.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from runner.launch import bootstrap
from tests.helpers import ROOT


def test_the_users_folder_is_found_last(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('taken for the standard library')")
    (tmp_path / "mine.py").write_text("def main(order):\n    print('called with', order['word'])\n")
    order = json.dumps({"path": [str(ROOT), str(tmp_path)], "word": "hello"})
    command = bootstrap.command("mine", order)
    assert "-P" in command
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.stderr) == ("called with hello\n", "")
