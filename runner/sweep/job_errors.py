"""What a job of a sweep raises to a sweeper that chooses its samples; the error has been printed.

JobFailed
└── JobStopped
"""

from __future__ import annotations


class JobFailed(Exception):
    """A job of a sweep failed."""


class JobStopped(JobFailed):
    """A job was stopped with its state saved, or was not begun, since the sweep is to end."""
