"""Keys of a sweep on the command line (C1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.sweep import settings


def test_settings_are_taken_out_of_the_overrides() -> None:
    found, rest = settings.take(["seed=1,2", "sweep.jobs=auto", "sweep.dir='my sweep'"])
    assert rest == ["seed=1,2"]
    assert (found.jobs, found.dir, found.list) == ("auto", "my sweep", None)
    assert settings.take(["seed=1"]) == (settings.Settings(), ["seed=1"])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sweep.job=2", "sweep.jobs"),
        ("sweep=2", "the keys of a sweep are"),
        ("sweep.jobs=0", "auto or at least 1"),
        ("sweep.dir=", "it has a value"),
        ("sweep.list=nowhere.yaml", "cannot be read (No such file"),
        ("sweep.list=[1]", "neither a list of overrides nor a mapping"),
        ("sweep.list=[[sweep.jobs=2]]", "Give it beside sweep.list."),
    ],
)
def test_mistakes_are_answered(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings.take([override])
    assert expected in str(raised.value)


def test_a_list_on_the_command_line() -> None:
    found, _ = settings.take(["sweep.list=[[optimizer.lr=1e-3,seed=1],[seed=2],seed=3]"])
    assert found.list == (("optimizer.lr=1e-3", "seed=1"), ("seed=2",), ("seed=3",))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("jobs.yaml", "- [model.width=4, 'tags=[a,b]']\n- {seed: 2, scheduler: null}\n"),
        (
            "jobs.txt",
            "# two jobs\nmodel.width=4 tags=[a,b]\n\nseed=2 scheduler=null  # the other\n",
        ),
        ("jobs.json", '[["model.width=4", "tags=[a,b]"], {"seed": 2, "scheduler": null}]'),
    ],
)
def test_a_list_in_a_file(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found, _ = settings.take([f"sweep.list={tmp_path / name}"])
    assert found.list == (("model.width=4", "tags=[a,b]"), ("seed=2", "scheduler=null"))


def test_settings_of_a_single_run_are_refused() -> None:
    (problem,) = settings.misplaced(["seed=1", "sweep.jobs=2"])
    assert "Add -m" in problem.remedy
