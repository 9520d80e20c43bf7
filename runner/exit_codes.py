"""Exit codes of the command, and those of a worker that its parent takes for a good end."""

from __future__ import annotations

DONE = 0
FAILED = 1
REFUSED = 2
# Stopped by a signal or by trainer.stop_after, with the state saved: `resume=` goes on.
STOPPED = 75
INTERRUPTED = 130
CLEAN = (DONE, STOPPED)
