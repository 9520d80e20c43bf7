"""The allow-list: by name, by what the name leads to, and by whom a package is trusted (C4)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import paths, trust
from tests.helpers import write_file


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(trust.VARIABLE, raising=False)


def package(folder: Path, name: str, source: str = "") -> None:
    write_file(folder / name / "__init__.py", source)


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.Linear",
        "torch.nn.functional.gelu",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.StepLR",
        "runner.builtin.digits.cnn",
        "runner.SupervisedStep",
    ],
)
def test_what_the_product_brings_in_is_trusted(name: str) -> None:
    assert callable(trust.resolve(name, "model._target_"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("os.system", "'os' is not trusted"),
        ("subprocess.run", "'subprocess' is not trusted"),
        ("torch.hub.load", "'torch' is not trusted"),
        ("shutil.copy", "'shutil' is not trusted"),
        ("torch.nn.functional.torch.hub.load", "resolves to torch.hub.load"),
        ("torch.nn.modules.module.functools.partial", "resolves to functools.partial"),
        ("torch.nn.Module.__init__", "private"),
        ("torch.nn._reduction.warnings", "private"),
        (
            "accel.machine.imports.require",
            "resolves to accel.machine.imports.require, which is not trusted",
        ),
        ("accel.machine.env.set_values", "resolves to accel.machine.env.set_values"),
        ("accel.config.checks.import_callable", "resolves to accel.config.checks"),
        ("accel.checkpoint.directory.prune", "resolves to accel.checkpoint.directory.prune"),
        ("runner.cli.program.code_of", "resolves to runner.cli.program.code_of"),
        ("runner.launch.launcher.launch", "resolves to runner.launch.launcher.launch"),
        (
            "runner.recipe.factory.register.model.get",
            "resolves to runner.recipe.factory.Registry.get",
        ),
        ("runner.training.step.SupervisedStep.__init__.__globals__", "private"),
        ("torch.nn.functional", "no class or function but module"),
        ("torch", "dotted name"),
        ("torch.nn.Lin ear", "dotted name"),
        ("", "dotted name"),
        ("torch.nn.Linaer", "Did you mean 'Linear'?"),
        ("torch.nn.nothing.at.all", "has no 'nothing'"),
    ],
)
def test_the_rest_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"model\._target_=") as refused:
        trust.resolve(name, "model._target_")
    assert why in str(refused.value)


def test_the_refusal_prints_the_line_to_add() -> None:
    problem = trust.distrust("wine.model.MLP", "model._target_")
    assert problem is not None
    assert '[tool.runner]\n    imports = ["wine"]\nor give --import wine.' in problem.remedy
    assert "'wine' is not trusted" in problem.rule


def test_trust_comes_from_the_project_above_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.runner]\nimports = ["wine_a"]\n')
    (tmp_path / "deep" / "er").mkdir(parents=True)
    package(tmp_path, "wine_a", "def mlp(): ...\n")
    monkeypatch.chdir(tmp_path / "deep" / "er")
    assert trust.trusted() == {"wine_a": str(tmp_path / "pyproject.toml")}
    paths.move_project_last()
    assert sys.path[-1] == str(tmp_path)
    trust.import_packages()
    assert "wine_a" in sys.modules
    assert callable(trust.resolve("wine_a.mlp", "model._target_"))
    sys.modules.pop("wine_a")


def test_a_trusted_package_does_not_lend_its_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "wine_b", "from os import system\nfrom torch.nn import Linear\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(trust.VARIABLE, "wine_b")
    paths.move_project_last()
    assert callable(trust.resolve("wine_b.Linear", "model._target_"))
    with pytest.raises(ConfigError, match=r"resolves to posix\.system|resolves to nt\.system"):
        trust.resolve("wine_b.system", "model._target_")
    sys.modules.pop("wine_b")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (None, "there is no such package"),
        ("import not_there_at_all", "importing it needs 'not_there_at_all'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, why: str
) -> None:
    if source is not None:
        package(tmp_path, "wine_c", source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(trust.VARIABLE, "wine_c")
    paths.move_project_last()
    with pytest.raises(ConfigError, match=why):
        trust.import_packages()


def test_a_target_that_ends_the_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "wine_e", "")
    (tmp_path / "wine_e" / "script.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(trust.VARIABLE, "wine_e")
    paths.move_project_last()
    with pytest.raises(ConfigError, match=r"importing wine_e.script ended in SystemExit\(0\)"):
        trust.resolve("wine_e.script.net", "model")


def test_an_error_inside_a_package_is_the_users_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "wine_d", "1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(trust.VARIABLE, "wine_d")
    paths.move_project_last()
    with pytest.raises(ZeroDivisionError):
        trust.import_packages()
