"""R7, R10: what a command does to the run directory before and after it trains."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner import cli
from runner.launch import launcher, start_run
from runner.recipe.composition import Examined
from runner.recipe.schema import Recipe
from runner.runs import directory, lock, sessions
from runner.runs.job import Job
from runner.runs.outcomes import Outcome
from tests.resume_matrix.cells import tree
from tests.runner.runs.test_directory import add_checkpoint

LITTLE = ("name=mine", "tracker.log_with=[]", "trainer.epochs=2")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


def launched(monkeypatch: pytest.MonkeyPatch, train: Callable[[Job], int]) -> None:
    """Let a function stand for the processes of a run."""

    def stand_in(job: Job, recipe: Recipe, **_: object) -> int:
        return train(job)

    monkeypatch.setattr(launcher, "launch", stand_in)


def run_dirs(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/*/*"))


def one_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start a run that leaves a checkpoint, as a run that is to be resumed does."""

    def train(job: Job) -> int:
        sessions.begin(job.place)
        add_checkpoint(job.run_dir / "checkpoints", 0)
        return 0

    launched(monkeypatch, train)
    assert cli.main(list(LITTLE)) == 0
    (run_dir,) = run_dirs(folder)
    return run_dir


def finished(run_dir: Path, **summary: Any) -> None:
    sessions.end(sessions.begun(run_dir)[-1], 0, summary={"complete": True, **summary})


# -- new runs ------------------------------------------------------------------------------


def test_where_nothing_was_started_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: Job) -> int:
        assert lock.holder(job.run_dir) is not None
        Outcome(0, 0.0, 2, "no plan for this model").write(job.place)
        return 2

    launched(monkeypatch, refuse)
    assert cli.main(list(LITTLE)) == 2
    assert not (tmp_path / "runs").exists()


def test_a_run_that_failed_before_its_first_step_is_shown_and_its_folder_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(job: Job) -> int:
        sessions.end(job.place, 1)
        return 1

    launched(monkeypatch, fail)
    line = [*LITTLE, "run_dir=a/b"]
    assert [cli.main(line), cli.main(line)] == [1, 1]
    assert len(sessions.of_run(tmp_path / "a" / "b")) == 2
    assert cli.main(["list", "a"]) == 0
    assert "failed" in capsys.readouterr().out


# -- resumed runs --------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 130])
def test_a_resume_that_fails_changes_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = one_run(tmp_path, monkeypatch)
    before = tree(run_dir)
    seen: list[Any] = []

    def fail(job: Job) -> int:
        seen.append(Job.load(job.place)[1].model["width"])
        assert lock.holder(run_dir) is not None
        return code

    launched(monkeypatch, fail)
    assert cli.main([f"resume={run_dir}", "model.width=48"]) == code
    assert seen == [48]
    after = tree(run_dir)
    changed = {name for name in after if before.get(name) != after[name]} - {".", ".lock"}
    assert all(name.startswith("sessions") for name in changed)
    assert {name for name in changed if name in before} <= {"sessions"}


def test_a_resume_with_other_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "wine_of_a_run.py"
    module.write_text("WIDTH = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RUNNER_IMPORTS", module.stem)
    run_dir = one_run(tmp_path, monkeypatch)
    launched(monkeypatch, lambda job: 0)
    for width, is_said in ((1, False), (2, True)):
        module.write_text(f"WIDTH = {width}\n")
        capsys.readouterr()
        assert cli.main([f"resume={run_dir}"]) == 0
        said = "resume: the Python files of the package wine_of_a_run differ"
        assert (said in capsys.readouterr().out) is is_said
        log = run_dir / "run.log"
        assert (log.exists() and said in log.read_text()) is is_said


def test_a_second_command_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = one_run(tmp_path, monkeypatch)
    with lock.held(run_dir):
        for line in ([f"resume={run_dir}"], [*LITTLE, "resume=auto"]):
            assert cli.main(line) == 2
            assert "another command trains in" in capsys.readouterr().err


def test_a_recipe_that_changed_while_a_command_started_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = one_run(tmp_path, monkeypatch)
    real = lock.held

    def late(path: Path) -> Any:
        sessions.begin(Job(run_dir).save(Recipe(name="mine", seed=4)).place)
        return real(path)

    monkeypatch.setattr(lock, "held", late)
    assert cli.main([f"resume={run_dir}"]) == 2
    assert "another command has changed the run meanwhile" in capsys.readouterr().err


def test_a_finished_run_says_so_and_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = one_run(tmp_path, monkeypatch)
    finished(run_dir, stopped="epochs", step=40, epochs_completed=2)
    before = tree(run_dir)
    for line in (
        [f"resume={run_dir}"],
        [f"resume={run_dir}", "trainer.max_time=60"],
        [*LITTLE, "resume=auto"],
    ):
        assert cli.main(line) == 0
        assert "is finished: trainer.epochs=2 completed at step 40" in capsys.readouterr().out
    assert cli.main([f"resume={run_dir}", "seed=7"]) == 2
    assert "seed=7 with resume" in capsys.readouterr().err
    changed = ("optimizer.lr=0.5", "model.width=48")
    assert cli.main([f"resume={run_dir}", *changed]) == 2
    told = capsys.readouterr().err
    for key in changed:
        assert f"{key} with resume=" in told
    assert told.count("it changes nothing any more") == 2
    assert tree(run_dir) == before


def test_a_full_disk_is_told_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert cli.main(list(LITTLE)) == 2
    told = capsys.readouterr().err
    assert "the disk is full: [Errno 28] No space left on device" in told
    assert "Make room there" in told
    assert "Traceback" not in told
    assert not run_dirs(tmp_path)


def test_a_relative_folder_of_states_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def train(job: Job) -> int:
        folder = Job.load(job.place)[1].checkpoint.project.project_dir
        seen.append(folder)
        if len(seen) == 1:
            add_checkpoint(directory.checkpoint_folder(job.run_dir), 0)
        return 75

    launched(monkeypatch, train)
    assert cli.main([*LITTLE, "checkpoint.project.project_dir=cks"]) == 75
    (run_dir,) = run_dirs(tmp_path)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert cli.main([f"resume={run_dir}"]) == 75
    assert cli.main([f"resume={run_dir}", "checkpoint.project.project_dir=../cks"]) == 75
    assert seen == [str(tmp_path / "cks")] * 3


# -- a directory of one's own --------------------------------------------------------------


def test_a_chosen_directory_is_the_run_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(job: Job) -> int:
        add_checkpoint(job.run_dir / "checkpoints", 0)
        return 0

    launched(monkeypatch, train)
    (tmp_path / "mine" / "sessions" / "0001").mkdir(parents=True)  # of a command that was killed
    (tmp_path / "mine" / ".lock").touch()
    (tmp_path / "mine" / "logs").mkdir()
    for log in ("slurm-7.out", "logs/7.err", "log.txt"):  # of the command itself
        (tmp_path / "mine" / log).touch()
    assert cli.main([*LITTLE, "run_dir=mine"]) == 0
    job, plain = Job.read(tmp_path / "mine")
    assert (job.run_dir, plain["run_dir"]) == (tmp_path / "mine", None)
    assert not (tmp_path / "runs").exists()


def test_the_run_of_a_chosen_directory_begins_anew_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a job that a scheduler starts again, which was killed in its first minutes."""
    command = [*LITTLE, "run_dir=mine", "resume=auto"]

    def killed(job: Job) -> int:
        (job.run_dir / "metrics.jsonl").write_text("{}")
        return -signal.SIGKILL

    launched(monkeypatch, killed)
    assert cli.main(command) != 0
    launched(monkeypatch, lambda job: len(list(job.run_dir.glob("metrics.jsonl"))))
    assert cli.main(command) == 0
    assert "no complete checkpoint lies there. The run begins anew" in capsys.readouterr().out
    assert (tmp_path / "mine" / "sessions" / "0001" / "metrics.jsonl").exists()
    assert Job.read(tmp_path / "mine")[1]["run_dir"] is None
    assert cli.main([*command, "seed=5"]) == 2
    assert "its recipe is another (seed is 0 there, 5 here)" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("resume=auto",)])
@pytest.mark.parametrize(
    ("left", "told"),
    [
        ("checkpoints/checkpoint_0/manifest.json", "holds checkpoints. Name another"),
        ("sweep.json", "holds sweep.json. Name another directory, such as run_dir="),
    ],
)
def test_a_chosen_directory_that_holds_anything_is_refused(
    left: str,
    told: str,
    more: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launched(monkeypatch, lambda job: pytest.fail("it was started"))
    (tmp_path / "used" / left).parent.mkdir(parents=True)
    (tmp_path / "used" / left).write_text("lr: 0.1\n")
    before = tree(tmp_path)
    assert cli.main([*LITTLE, "run_dir=used", *more]) == 2
    told_here = " ".join(capsys.readouterr().err.split())
    assert told in told_here
    assert "another run" not in told_here
    assert cli.main([*LITTLE, "run_dir=used", *more, "--dry-run"]) == 2
    assert tree(tmp_path) == before


def test_a_chosen_directory_goes_if_nothing_was_started_and_its_parent_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, lambda job: 2)
    (tmp_path / "a").mkdir()
    assert cli.main([*LITTLE, "run_dir=a/b"]) == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


# -- a job that is frozen, and started elsewhere -------------------------------------------


def frozen(recipe: Recipe, hand_over: Callable[[Job, Recipe], int]) -> None:
    start_run.start(Examined(recipe, [], ("seed=3",), "config"), train=hand_over)


def test_a_frozen_job_is_trained_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Path] = []

    def hand_over(job: Job, recipe: Recipe) -> int:
        assert lock.holder(job.run_dir) is not None
        found.append(job.run_dir)
        return 0

    frozen(Recipe(name="mine", seed=3), hand_over)
    (run_dir,) = found
    assert run_dirs(tmp_path) == [run_dir]
    assert lock.holder(run_dir) is None
    job, recipe = Job.load(run_dir)
    assert (job.overrides, recipe.seed) == (("seed=3",), 3)
    launched(monkeypatch, lambda job: 0)
    assert start_run.continue_in(run_dir, Examined(recipe, [], job.overrides, "config")) == 0
    assert [one.name for one in sessions.of_run(run_dir)] == ["0001", "0002"]


@pytest.mark.parametrize("recipe", [Recipe(name="mine"), Recipe(run_dir="chosen")])
def test_nothing_is_left_of_a_job_that_nobody_takes(recipe: Recipe, tmp_path: Path) -> None:
    def refuse(job: Job, recipe: Recipe) -> int:
        raise ConfigError.of("there", "is no room", "Wait.")

    with pytest.raises(ConfigError, match="no room"):
        frozen(recipe, refuse)
    assert list(tmp_path.iterdir()) == []
