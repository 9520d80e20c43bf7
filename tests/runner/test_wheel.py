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

from runner import cli
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
    for name in ("accel", "runner", "hydra_plugins", "conf", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    folder = tmp_path_factory.mktemp("wheel")
    build = python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), ".")
    run(build, source)
    return next(folder.glob("*.whl"))


def test_what_the_wheel_holds(wheel: Path) -> None:
    held = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in held if ".dist-info" not in name}
    assert tops == {"accel", "runner", "hydra_plugins"}
    plugins = {name for name in held if name.startswith("hydra_plugins/")}
    assert "hydra_plugins/accel_runner.py" in plugins
    assert "hydra_plugins/__init__.py" not in plugins  # a namespace, which other packages share
    shipped = {name.removeprefix("runner/conf/") for name in held if name.endswith(".yaml")}
    names = ("myproject/conf/experiment/myproject", "lm_sft_chat/conf/experiment/mine")
    names += ("text_classification/conf/experiment/mine",)
    examples = {f"runner/examples/{name}.yaml" for name in names}
    conf = {path.relative_to(ROOT / "conf").as_posix() for path in _yaml_files()}
    assert shipped == {*conf, *examples}
    assert "accel/py.typed" in held


def _yaml_files() -> list[Path]:
    return list((ROOT / "conf").rglob("*.yaml"))


@pytest.mark.slow  # it installs the wheel, trains twice and starts pytest
def test_a_new_project_trains_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site))
    run(python(*install, str(wheel)), tmp_path)
    project, runner = tmp_path / "my-arms", str(site / "bin" / "runner")
    run([runner, "new", "my-arms"], tmp_path, PYTHONPATH=str(site))
    output = run([runner, "experiment=my_arms", "trainer.epochs=5"], project, PYTHONPATH=str(site))
    assert str(ROOT) not in output
    summary = next(project.glob("runs/my_arms/*/summary.json"))
    assert json.loads(summary.read_text())["metrics"]["test"]["accuracy"] > 0.8
    assert "1 passed" in run(python("-m", "pytest"), project, PYTHONPATH=str(site))
    probe = python("-P", "-c", "import runner, accel; print(runner.__file__, accel.__file__)")
    assert run(probe, project, PYTHONPATH=str(site)).count(str(site)) == 2


@pytest.mark.parametrize("name", ["torch", "1st", "there"])
def test_a_new_project_has_a_folder_and_a_name_of_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert cli.main(["new", "there"]) == 0  # the folder was empty
    assert (tmp_path / "there" / "there" / "__init__.py").is_file()
    assert "runner experiment=there" in capsys.readouterr().out
    assert cli.main(["new", name]) == 2
    assert f"new {name}: " in capsys.readouterr().err
