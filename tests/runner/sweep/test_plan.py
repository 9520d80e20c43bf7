"""Keys of a sweep on the command line (C1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.sweep import plan


def test_settings_are_taken_out_of_the_overrides() -> None:
    found, rest = plan.take(["seed=1,2", "sweep.jobs=auto", "sweep.dir='my sweep'"])
    assert rest == ["seed=1,2"]
    assert (found.jobs, found.dir, found.list) == ("auto", "my sweep", None)
    assert plan.take(["seed=1"]) == (plan.Settings(), ["seed=1"])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sweep.job=2", "sweep.jobs"),
        ("sweep=2", "the keys of a sweep are"),
        ("sweep.jobs=0", "auto or at least 1"),
        ("sweep.dir=", "it has a value"),
        ("sweep.list=nowhere.yaml", "No such file"),
        ("sweep.list=[1]", "1 is no list of overrides"),
        ("sweep.list=[[sweep.jobs=2]]", "Give it beside sweep.list."),
    ],
)
def test_mistakes_are_answered(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan.take([override])
    assert expected in str(raised.value)


def test_a_list_on_the_command_line() -> None:
    found, _ = plan.take(["sweep.list=[[optimizer.lr=1e-3,seed=1],[seed=2]]"])
    assert found.list == (("optimizer.lr=1e-3", "seed=1"), ("seed=2",))


def test_a_list_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text("- [model.width=4, 'tags=[a,b]']\n- [seed=2]\n")
    found, _ = plan.take([f"sweep.list={tmp_path / 'jobs.yaml'}"])
    assert found.list == (("model.width=4", "tags=[a,b]"), ("seed=2",))
