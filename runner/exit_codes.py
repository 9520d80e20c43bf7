"""Exit codes of the command, and those of a worker that is not to be treated as failed."""

from __future__ import annotations

DONE = 0
FAILED = 1
REFUSED = 2
STOPPED = 75
INTERRUPTED = 130
OF_SIGNAL = 128  # and its number: how a shell says that a signal has ended a command
CLEAN = (DONE, STOPPED)

# As `runner --help` and docs/runs.md list them.
MEANINGS = {
    DONE: "done",
    FAILED: "failed; of a sweep: at least one job failed, or was not started",
    REFUSED: "the configuration was refused, nothing was started",
    STOPPED: "stopped by a signal or trainer.max_time and saved; resume= (-m: the same) goes on",
    INTERRUPTED: "interrupted by Ctrl-C",
}
