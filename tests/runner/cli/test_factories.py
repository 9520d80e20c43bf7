"""`runner factories`: what a recipe can name, with arguments and defaults (C1, X1)."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from runner import cli
from runner.cli import factories
from runner.recipe.factory import register
from runner.recipe.keys import FACTORY_NODES, NAMED_NODES

pytestmark = pytest.mark.usefixtures("elsewhere")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(["factories", *arguments]) == code
    return "".join(capsys.readouterr())


def test_every_registered_factory_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys)
    kinds = [*FACTORY_NODES, *NAMED_NODES.values()]
    for name in (name for kind in kinds for name in getattr(register, kind).builtin):
        line = next(line for line in out.splitlines() if line.startswith(f"  {name} "))
        assert line.split()[1:], name  # its docstring
    assert "sgd" in out  # a file that names a `_target_`
    assert "bytes_gpt           A byte-level GPT on" in out


def test_a_kind_is_listed_with_arguments_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert "label_smoothing: float = 0.0" in printed(capsys, "objectives")


def test_one_factory_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "schedules", "cosine")
    assert (inspect.getdoc(register.scheduler.get("cosine")) or "") in out
    assert "optimizer: whose rates" in out
    assert "scheduler=cosine  warmup=0.1" in out
    assert "optimizer=sgd  lr=0.1, momentum=0.9" in printed(capsys, "optimizers", "sgd")
    assert "- override /model: byte_gpt" in printed(capsys, "recipes", "bytes_gpt")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [(["callback"], "callbacks"), (["schedules", "cosin"], "cosine"), (["recipes", "gam"], "gan")],
)
def test_a_typo_is_answered_with_the_nearest_name(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"Did you mean '{remedy}'?" in printed(capsys, *arguments, code=2)


def test_files_of_the_project_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "model/wide.yaml": "name: cnn\nwidth: 9\n",
        "callbacks/late.yaml": "{}",
    }.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert "model=wide  width=9" in printed(capsys, "models", "cnn")
    assert set(factories.listed("callbacks")) >= set(register.callback.names())
