"""Workers that are stopped (SIGSTOP), or whose interpreter is: they answer nothing. Free of torch.

Where that is so of every worker of a machine, no watchdog of a worker notices it. Their parent
does.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path

LOOK_SECONDS = 1.0
# Not "t": a debugger holds that process, and lets it go on.
STOPPED = "T"
# Workers whose watchdogs have been silent for that many time limits hang: native code that computes
# may keep the interpreter for long.
SILENT_LIMITS = 6


def process_state(pid: int | str) -> str:
    """Return the state of a process as Linux lists it, "?" where it is not known (macOS).

    "T": stopped by a signal; "t": held by a debugger; "Z": ended; "X": gone.

    Source: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    """
    try:
        listed = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X" if Path("/proc/self/stat").exists() else "?"
    return listed.rpartition(")")[2].split()[0]


def look_seconds(limit: float | None) -> float:
    """Return how often workers are looked at that may be stopped for `limit` seconds."""
    return LOOK_SECONDS if limit is None else min(LOOK_SECONDS, limit / 10)


class StoppedWorkers:
    """How long workers of this machine have been stopped while this process ran.

    Time during which this process was stopped as well (Ctrl-Z, a suspended job) does not count.

    Args:
        limit: seconds for which all workers may be stopped; None: any time.
        grace: seconds for which one may be stopped after a stop signal was sent to it.
        last_beat: tells when a rank's watchdog was alive, at any clock; None: it is not watched.
        state_of: tells the state of a process, as `process_state`, which is the default.
        name_of: tells what it is called in messages; as a process of this machine by default.
    """

    def __init__(
        self,
        limit: float | None,
        grace: float,
        last_beat: Callable[[int], int | None] = lambda rank: None,
        state_of: Callable[[int], str] | None = None,
        name_of: Callable[[int], str] | None = None,
    ) -> None:
        self._limit, self._grace, self._last_beat = limit, grace, last_beat
        self._state_of = state_of or process_state
        self._name_of = name_of or _who
        self._beats: dict[int, tuple[int | None, float]] = {}  # the last, and when it was seen
        self._interval = look_seconds(limit)
        self._looked = time.monotonic()
        self._clock = 0.0  # seconds that this process ran
        self._since: dict[int, float] = {}  # when, by this clock, each rank was first seen stopped
        self._requested: tuple[float, str] | None = None

    def request(self, name: str) -> None:
        """Note that a stop signal, e.g. "SIGTERM", was sent to the workers."""
        if self._requested is None:
            self._requested = self._clock, name

    def failed(self, running: Mapping[int, int]) -> dict[int, str]:
        """Return the ranks that count as failed because they are stopped, and why.

        Called as often as one likes: states are read about once a second.

        Args:
            running: process ids of the ranks that have not ended.
        """
        elapsed = time.monotonic() - self._looked
        if elapsed < self._interval:
            return {}
        self._looked += elapsed
        # More has passed only if this process did not run meanwhile.
        self._clock += min(elapsed, 2 * self._interval)
        stopped = {rank for rank, pid in running.items() if self._state_of(pid) == STOPPED}
        self._since = {rank: self._since.get(rank, self._clock) for rank in sorted(stopped)}
        found = {rank: self._unanswered(running[rank]) for rank in self._late()}
        return found or self._hang(running, stopped) or self._silent(running)

    def _late(self) -> list[int]:
        """Return the ranks that have not answered a stop signal within the grace time."""
        if self._requested is None:
            return []
        asked, _ = self._requested
        return [
            rank
            for rank, since in self._since.items()
            if self._clock - max(since, asked) >= self._grace
        ]

    def _unanswered(self, pid: int) -> str:
        assert self._requested is not None
        _, name = self._requested
        return f"{self._name_of(pid)} does not answer {name}: it is stopped (SIGSTOP?)"

    def _hang(self, running: Mapping[int, int], stopped: Set[int]) -> dict[int, str]:
        """Return all ranks, if all have been stopped for longer than the limit."""
        if self._limit is None or not running or stopped != running.keys():
            return {}
        if self._clock - max(self._since.values()) < self._limit:
            return {}
        others = ", as are all workers that this command has started" if len(running) > 1 else ""
        why = f"does not answer: it is stopped (SIGSTOP?){others}"
        return {rank: f"it hangs: {self._name_of(pid)} {why}" for rank, pid in running.items()}

    def _silent(self, running: Mapping[int, int]) -> dict[int, str]:
        """Return all ranks, if the watchdogs of all have been silent for too long."""
        if self._limit is None:
            return {}
        for rank in running:
            beat = self._last_beat(rank)
            if beat is None or beat != self._beats.get(rank, (None, 0.0))[0]:
                self._beats[rank] = beat, self._clock
        seconds = [self._clock - self._beats[rank][1] for rank in running]
        watched = all(self._beats[rank][0] is not None for rank in running)
        if not running or not watched or min(seconds) < SILENT_LIMITS * self._limit:
            return {}
        return {
            rank: f"it hangs: the watchdog of {self._name_of(pid)} is silent: "
            "native code keeps the interpreter; its log has the stack"
            for rank, pid in running.items()
        }


def _who(pid: int) -> str:
    return f"its process {pid} on {socket.gethostname()}"
