"""The first second and the last of a command: a sign of life, and a quiet end."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli import program
from runner.training import startup
from tests.helpers import SECONDS, python

ROOT = Path(__file__).resolve().parents[3]
# Ends where torch would be loaded, which takes seconds.
WITHOUT_TORCH = """
import sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch is loaded", file=sys.stderr)
            raise SystemExit(3)

sys.meta_path.insert(0, Guard())
from runner import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def start(arguments: tuple[str, ...], folder: Path, **streams: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        python(*arguments),
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        **streams,
    )


def test_something_shows_before_torch_is_loaded(tmp_path: Path) -> None:
    with start(("-c", WITHOUT_TORCH, "name=mine"), tmp_path) as command:
        _, err = command.communicate(timeout=SECONDS)
    assert err.splitlines()[:2] == ["mine: loading PyTorch …", "torch is loaded"]


@pytest.mark.parametrize(
    "wrong",
    ["model.widht=3", "model.name=cnm", "optimizer.lr='0.1'", "step=gan", "precision=nope"],
)
def test_names_and_arguments_are_refused_before_torch_is_loaded(wrong: str, tmp_path: Path) -> None:
    with start(("-c", WITHOUT_TORCH, wrong), tmp_path) as command:
        _, err = command.communicate(timeout=SECONDS)
    assert command.returncode == 2
    assert "torch is loaded" not in err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_while_torch_is_loaded_finishes_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(arguments: list[str]) -> int:
        startup.announce("mine")
        raise KeyboardInterrupt

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(program, "_run", load)
    assert program.run([]) == 130
    assert terminal.getvalue() == "mine: loading PyTorch …\r\nInterrupted.\n"


def read_one_line(arguments: tuple[str, ...], folder: Path) -> tuple[int, str]:
    """Return exit code and standard error of a command whose reader goes after one line."""
    with start(("-m", "runner", *arguments), folder, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert command.stdout.readline()
        command.stdout.close()
        err = command.stderr.read()
        return command.wait(SECONDS), err


def test_a_reader_that_goes_leaves_a_short_output_quiet(tmp_path: Path) -> None:
    code, err = read_one_line(("--cfg", "job"), tmp_path)
    assert (code in (0, 1), err) == (True, "")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("distributed=multi_cpu",)], ids=["one", "two"])
def test_a_reader_that_goes_ends_training_quietly(more: tuple[str, ...], tmp_path: Path) -> None:
    recipe = ("tracker.log_with=[]", "trainer.log_every=1", *more)
    code, err = read_one_line(recipe, tmp_path)
    assert (code, err) == (1, "digits: loading PyTorch …\n")
