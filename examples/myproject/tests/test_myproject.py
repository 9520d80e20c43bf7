"""The recipe trains: one step of everything."""

import subprocess
import sys
from pathlib import Path


def test_one_step_of_everything(tmp_path: Path) -> None:
    command = ("runner", "experiment=myproject", "debug=fdr", f"output_dir={tmp_path}")
    project = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-m", *command], cwd=project, check=True)
