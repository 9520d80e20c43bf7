"""The storage of a study survives what a machine does to it (S4)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import optuna
import pytest

from accel.machine.errors import ConfigError
from runner.training import optuna_study
from tests.helpers import python


def opened(folder: Path) -> optuna.Study:
    storage = optuna_study.storage_of("study.journal", folder)
    return optuna.create_study(storage=storage, study_name="s", load_if_exists=True)


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.tell(first.ask(), 1.0)
    path = tmp_path / "study.journal"
    path.write_bytes(path.read_bytes() + b'{"op_code": 4, "worke')
    again = opened(tmp_path)
    assert len(again.trials) == 1
    again.tell(again.ask(), 2.0)
    first.tell(first.ask(), 3.0)
    assert [trial.value for trial in opened(tmp_path).trials] == [1.0, 2.0, 3.0]


def test_a_database_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unable to open"):
        optuna_study.storage_of(f"sqlite:///{tmp_path}/none/s.db", tmp_path)
    (tmp_path / "s.db").write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="file is not a database"):
        optuna_study.storage_of(f"sqlite:///{tmp_path}/s.db", tmp_path)


def test_processes_write_one_after_the_other(tmp_path: Path) -> None:
    opened(tmp_path)
    code = (
        "import sys; from pathlib import Path; "
        "from tests.runner.training.test_optuna_study import opened\n"
        "study = opened(Path(sys.argv[1]))\n"
        "for _ in range(20): study.tell(study.ask(), 0.5)"
    )
    started = [subprocess.Popen(python("-c", code, str(tmp_path))) for _ in range(2)]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    assert len(opened(tmp_path).trials) == 40


def test_samplers_and_pruners_have_short_names() -> None:
    spec = {"name": "median", "n_startup_trials": 1}
    assert isinstance(optuna_study.make("pruner", spec), optuna.pruners.MedianPruner)
    wrapped = {"name": "patient", "patience": 2, "wrapped_pruner": "median"}
    assert isinstance(optuna_study.make("pruner", wrapped), optuna.pruners.PatientPruner)
    assert isinstance(optuna_study.make("pruner", None), optuna.pruners.NopPruner)
    for name in ("tpe", "random", "cmaes", "gp", "nsgaii", "qmc"):
        optuna_study.make("sampler", name, seed=1)
