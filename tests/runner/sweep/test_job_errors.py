"""Errors of jobs cross processes."""

from __future__ import annotations

import pickle

from runner.sweep.job_errors import JobFailed, JobStopped


def test_a_stop_is_told_from_a_failure_in_another_process() -> None:
    error = pickle.loads(pickle.dumps(JobStopped("job 3 was stopped")))
    assert isinstance(error, JobStopped)
    assert isinstance(error, JobFailed)
    assert str(error) == "job 3 was stopped"
