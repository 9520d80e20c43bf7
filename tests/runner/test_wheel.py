"""The wheel, and a project of a user's own that trains with it outside of this repository.

Holds C4, X1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.helpers import python

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], cwd: Path, **environment: str) -> str:
    answer = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree as it stands, built from a copy without what lies around."""
    source = tmp_path_factory.mktemp("source")
    for name in ("accel", "runner", "hydra_plugins", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    folder = tmp_path_factory.mktemp("wheel")
    build = python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), ".")
    run(build, source)
    return next(folder.glob("*.whl"))


def test_what_the_wheel_holds(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"accel", "runner", "hydra_plugins"}
    plugins = {name for name in names if name.startswith("hydra_plugins/")}
    assert "hydra_plugins/accel_runner.py" in plugins
    assert "hydra_plugins/__init__.py" not in plugins  # a namespace, which other packages share
    shipped = {name.removeprefix("runner/conf/") for name in names if name.endswith(".yaml")}
    assert shipped == {path.relative_to(ROOT / "conf").as_posix() for path in _yaml_files()}
    assert "accel/py.typed" in names


def _yaml_files() -> list[Path]:
    return list((ROOT / "conf").rglob("*.yaml"))


@pytest.mark.slow  # `test_recipes.py` trains it inside
def test_the_example_project_trains_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site))
    run(python(*install, str(wheel)), tmp_path)
    project = tmp_path / "wine"
    shutil.copytree(ROOT / "examples" / "wine", project)
    command = [str(site / "bin" / "runner"), "experiment=wine", "trainer.epochs=5"]
    output = run(command, project, PYTHONPATH=str(site))
    assert str(ROOT) not in output
    summary = next(project.glob("runs/wine/*/summary.json"))
    assert json.loads(summary.read_text())["metrics"]["test"]["accuracy"] > 0.8
    probe = python("-P", "-c", "import runner, accel; print(runner.__file__, accel.__file__)")
    assert run(probe, project, PYTHONPATH=str(site)).count(str(site)) == 2
