"""R3: `runner submit` on a Slurm of two nodes: a run as a job, requeued into its own directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner import cli
from runner.runs import sessions
from runner.runs.job import Job
from runner.runs.record import RunRecord
from tests.runner.slurm_runs import (
    LONG,
    ONE_EACH,
    QUICK,
    command,
    log,
    submitted,
    trained_here,
    wait_for_checkpoint,
    wait_for_end,
    weights,
)
from tests.slurm import SECONDS, Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
HELD = "submit.extra=['--hold']"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm_cluster: Cluster) -> Cluster:
    """Submit from this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name, value in slurm_cluster.variables.items():
        monkeypatch.setenv(name, value)
    return slurm_cluster


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["submit.partition=nosuch"], "invalid partition"),
        (["trainer.global_batch_size=3", *ONE_EACH, "trainer.micro_batch_size=2"], "batch"),
    ],
)
def test_a_wrong_recipe_is_refused_and_nothing_submitted(
    line: list[str], told: str, here: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = here.jobs()
    assert cli.main(["submit", "trainer.max_steps=2", *line]) == 2
    assert told in capsys.readouterr().err
    assert here.jobs() == before
    assert list(tmp_path.iterdir()) == []


def test_a_job_is_frozen_and_a_second_one_of_its_run_refused(
    here: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["submit", *QUICK, HELD, "trainer.max_steps=2", "run_dir=there"]) == 0
    shown = capsys.readouterr().out
    run_dir = Path("there").absolute()
    job_id = sessions.submitted_job(run_dir)
    assert here.state(job_id) == "PENDING"
    assert f"run:    {run_dir}" in shown
    assert f"scancel {job_id}" in shown
    assert RunRecord(run_dir).status == "submitted"
    assert RunRecord(run_dir).reason == f"Slurm's job {job_id} has not begun"
    assert cli.main(["submit", "resume=there", "trainer.max_steps=3"]) == 2
    assert f"job {job_id} trains it (state PENDING)" in capsys.readouterr().err
    here.ask("scancel", job_id)
    wait_until(lambda: job_id not in here.jobs(), "it was not cancelled")
    assert cli.main(["submit", "resume=there", "trainer.max_steps=3", HELD]) == 0
    second = sessions.submitted_job(run_dir)
    assert second != job_id
    assert Job.load(sessions.of_run(run_dir)[-1])[1].trainer.max_steps == 3
    assert Job.load(run_dir)[1].trainer.max_steps == 2  # until a step of it is made
    here.ask("scancel", second)


@pytest.mark.slow
@pytest.mark.parametrize("where", [(), ONE_EACH], ids=["one", "two nodes"])
def test_a_job_trains_what_the_same_processes_train_here(
    where: tuple[str, ...], slurm_cluster: Cluster, tmp_path: Path
) -> None:
    line = (*QUICK, "trainer.max_steps=20", *(("distributed=multi_cpu",) if where else ()))
    job_id, run_dir = submitted(slurm_cluster, tmp_path, *line, *where)
    wait_for_end(slurm_cluster, job_id, run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["complete"] is True
    assert ("2 processes" in log(run_dir)) is bool(where)
    assert weights(run_dir) == weights(trained_here(slurm_cluster, tmp_path, *line))


REQUEUE, WARNING = ("scontrol", "requeue"), ("scancel", "--signal=USR1")  # as --signal=USR1@… does


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "told", "where"),
    [
        (REQUEUE, "SIGTERM received", ()),
        (WARNING, "SIGUSR1 received", ()),
        pytest.param(REQUEUE, "SIGTERM received", ONE_EACH, marks=pytest.mark.long),
    ],
)
def test_a_job_that_is_queued_again_goes_on_in_its_directory(
    stop: tuple[str, ...], told: str, where: tuple[str, ...], slurm_cluster: Cluster, tmp_path: Path
) -> None:
    job_id, run_dir = submitted(slurm_cluster, tmp_path, *LONG, *where)
    wait_for_checkpoint(run_dir)
    slurm_cluster.ask(*stop, job_id)
    wait_for_end(slurm_cluster, job_id, run_dir)
    assert "resumed" in log(run_dir)
    assert told in log(run_dir)
    assert [path for path in (tmp_path / "runs" / "digits").iterdir()] == [run_dir]
    line = (*LONG, *(["distributed=multi_cpu"] if where else []))
    assert weights(run_dir) == weights(trained_here(slurm_cluster, tmp_path, *line))


@pytest.mark.long  # a requeued one is not
def test_a_preempted_job_goes_on_in_its_directory(slurm_cluster: Cluster, tmp_path: Path) -> None:
    whole = ("submit.extra=['--exclusive']", "submit.partition=low", *ONE_EACH)
    job_id, run_dir = submitted(slurm_cluster, tmp_path, *LONG, *whole)
    wait_for_checkpoint(run_dir)
    urgent = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive"]
    other = slurm_cluster.ask(*urgent, f"--output={tmp_path / 'urgent'}", "--wrap=sleep 3")
    slurm_cluster.wait_for(other, "COMPLETED")
    wait_for_end(slurm_cluster, job_id, run_dir)
    assert "SIGTERM received" in log(run_dir)
    assert "resumed" in log(run_dir)
    line = (*LONG, "distributed=multi_cpu")
    assert weights(run_dir) == weights(trained_here(slurm_cluster, tmp_path, *line))


@pytest.mark.slow
def test_scancel_saves_the_state_and_submitting_again_resumes(
    slurm_cluster: Cluster, tmp_path: Path
) -> None:
    job_id, run_dir = submitted(slurm_cluster, tmp_path, *LONG)
    wait_for_checkpoint(run_dir)
    slurm_cluster.ask("scancel", job_id)
    slurm_cluster.wait_for(job_id, "CANCELLED")
    wait_until(lambda: job_id not in slurm_cluster.jobs(), "it is queued again")
    assert "SIGTERM received" in log(run_dir)
    job_id, again = submitted(slurm_cluster, tmp_path, f"resume={run_dir}")
    assert again == run_dir
    wait_for_end(slurm_cluster, job_id, run_dir)
    assert "resumed" in log(run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["step"] == 3000


@pytest.mark.slow
def test_a_failing_rank_ends_the_job_as_failed(slurm_cluster: Cluster, tmp_path: Path) -> None:
    broken = ("trainer.max_steps=50", "optimizer.lr=1e30", *ONE_EACH)
    job_id, run_dir = submitted(slurm_cluster, tmp_path, *QUICK, *broken)
    assert slurm_cluster.wait_for(job_id, "COMPLETED", "FAILED", seconds=2 * SECONDS) == "FAILED"
    assert "the run failed" in log(run_dir) or "failed first" in log(run_dir)
    shown = command(slurm_cluster, tmp_path, "show", str(run_dir)).stdout
    assert "failed" in shown


@pytest.mark.slow
def test_a_limit_of_slurms_own_is_met(slurm_cluster: Cluster, tmp_path: Path) -> None:
    """Slurm counts limits in minutes: the run is stopped once, and goes on."""
    limit = ("submit.time=00:01:02", "submit.signal_delay_s=1", "trainer.max_steps=null")
    endless = [*(one for one in LONG if "max_steps" not in one), "trainer.epochs=100000"]
    job_id, run_dir = submitted(slurm_cluster, tmp_path, *endless, *limit)
    slurm_cluster.wait_for(job_id, "RUNNING")  # it may be pending while other jobs run
    slurm_cluster.wait_for(job_id, "PENDING", seconds=2 * SECONDS)
    slurm_cluster.wait_for(job_id, "RUNNING")
    assert "SIGUSR1 received" in log(run_dir)
    slurm_cluster.ask("scancel", job_id)
    slurm_cluster.wait_for(job_id, "CANCELLED")


@pytest.mark.slow
def test_a_run_that_is_finished_ends_at_once(slurm_cluster: Cluster, tmp_path: Path) -> None:
    line = [*(one for one in LONG if "max_steps" not in one), "trainer.max_steps=2"]
    job_id, run_dir = submitted(slurm_cluster, tmp_path, *line)
    wait_for_end(slurm_cluster, job_id, run_dir)
    slurm_cluster.ask("scontrol", "requeue", job_id)
    wait_for_end(slurm_cluster, job_id, run_dir)
    assert "Nothing is left to do" in log(run_dir)
