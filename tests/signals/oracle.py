"""What is left of a run that was ended from outside, and what is wrong with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from accel.checkpoint import directory
from accel.machine.errors import AccelError
from runner.recipe import serialization
from runner.runs.job import Job
from tests.helpers import alive, with_path

# The variable that marks the processes of one run: whatever they start inherits it.
MARK = "RUNNER_SIGNALS_RUN"
# A busy machine takes twenty times what an idle one takes.
PATIENCE_SECONDS = 300.0
# From the signal to the end; a busy machine gets as long again as the run took to the phase.
LIMIT_SECONDS = 60.0


def marked(mark: str) -> list[int]:
    """Return the processes that run and have `mark` in their environment, whoever started them."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to others
            if wanted in (place / "environ").read_bytes().split(b"\0") and alive(int(place.name)):
                found.append(int(place.name))
    return sorted(set(found) - {os.getpid()})


def kill(mark: str) -> None:
    """Kill the processes that `marked` finds."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Command:
    """A command that is marked; it prints into a file: an orphan would keep a pipe open.

    Args:
        line: its words.
        output: the file; the folder is its working directory.
        mark: of it and of all that it starts.
        session: whether it leads a session of its own.
    """

    def __init__(
        self, line: Sequence[str], output: Path, mark: str, *, session: bool = False
    ) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                line,
                cwd=output.parent,
                env=with_path(**{"OMP_NUM_THREADS": "1", MARK: mark}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=session,
            )

    def code(self, seconds: float = PATIENCE_SECONDS) -> int | None:
        """Wait for the end, and return the exit code; None: it did not end in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode

    def printed(self) -> str:
        """Return what it has printed."""
        return self.output.read_text(errors="replace")


def command(pid: int) -> str:
    """Return the beginning of a process's command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").replace("\n", " ")[:160]
    return ""


@dataclass(frozen=True)
class State:
    """What a run directory holds.

    Attributes:
        whole: steps of its whole checkpoints, oldest first.
        torn: why those that pass for whole are not.
        logged: steps of the training rows of metrics.jsonl.
        wrong: why the run cannot be resumed; empty: nothing speaks against it.
    """

    whole: tuple[int, ...] = ()
    torn: tuple[str, ...] = ()
    logged: tuple[int, ...] = ()
    wrong: str = ""

    @property
    def saved(self) -> int | None:
        """The step of the newest whole checkpoint."""
        return self.whole[-1] if self.whole else None

    @classmethod
    def read(cls, run_dir: Path | None) -> State:
        """Read a run directory; None: there is none."""
        if run_dir is None:
            return cls(wrong="there is no run directory")
        whole, torn = [], []
        for path in directory.checkpoints(run_dir / "checkpoints"):
            if not (path / directory.MANIFEST).exists():
                continue  # nobody takes it for a checkpoint
            try:
                whole.append(int(directory.verify(path).metadata["step"]))
            except (AccelError, KeyError) as error:
                torn.append(f"{path.name}: {error!r}")
        wrong = unreadable(run_dir) or ("" if whole else "there is no whole checkpoint")
        try:
            rows = tuple(logged(run_dir))
        except (ValueError, KeyError) as error:
            rows, wrong = (), f"metrics.jsonl: {error!r}"
        return cls(tuple(whole), tuple(torn), rows, wrong)


def logged(run_dir: Path) -> list[int]:
    """Return the steps of the training rows of metrics.jsonl.

    Raises:
        ValueError: if it has a line that is cut off.
    """
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [int(row["step"]) for row in rows if row["split"] == "train"]


def unreadable(run_dir: Path) -> str:
    """Return why a run's job or recipe cannot be read as it was written; empty: it can."""
    try:
        serialization.from_plain(Job.read(run_dir)[1])
    except (AccelError, OSError, ValueError, KeyError, TypeError) as error:
        return repr(error)
    return ""


@dataclass(frozen=True)
class Resumed:
    """What became of resuming a run for one step.

    Attributes:
        code: the exit code.
        made: the steps that its ranks have made, by rank.
        state: the run directory afterwards.
        output: what it printed.
    """

    code: int
    made: tuple[tuple[int, ...], ...]
    state: State
    output: str = ""

    def problems(self, saved: int | None) -> list[str]:
        """Return what is wrong if it went on from step `saved`."""
        if saved is None:
            return ["resumed: there was nothing to resume"]
        found, step = [], saved + 1
        if self.code != 0:
            found.append(f"resumed: exit code {self.code}")
        if not self.made or any(steps != (step,) for steps in self.made):
            found.append(f"resumed: made the steps {self.made}, not {step} on every rank")
        if self.state.logged != tuple(range(1, step + 1)):
            found.append(f"resumed: rows of the steps {short(self.state.logged)}, not 1 to {step}")
        if self.state.saved != step:
            found.append(f"resumed: the state of step {self.state.saved} is saved, not of {step}")
        return found


@dataclass(frozen=True)
class Expected:
    """What a person expects of a run that gets a signal.

    Attributes:
        code: the exit code.
        saves: whether the state is saved because of the signal.
        every_steps: steps between the checkpoints that are written all the same; None: none.
        resumes: whether it is resumed afterwards.
        workers: loader workers of each rank when the signal comes; None: it does not matter.
    """

    code: int
    saves: bool
    every_steps: int | None = None
    resumes: bool = False
    workers: int | None = None


@dataclass(frozen=True)
class Result:
    """What became of a run.

    Attributes:
        code: its exit code.
        made: the steps that its ranks have made, by rank.
        before: the run directory when the signal came.
        after: the run directory at the end.
        orphans: what is left of its processes: their command lines.
        seconds: from the signal to the end of the parent.
        workers: loader workers when the signal came, by rank.
        arrival: seconds that the run took to the phase.
        mishaps: what went wrong with the cell itself: nobody to strike, …
        resumed: what became of resuming it; None: that was not tried.
        output: what it printed.
    """

    code: int
    made: tuple[tuple[int, ...], ...]
    before: State
    after: State
    orphans: tuple[str, ...]
    seconds: float
    workers: tuple[int, ...] = ()
    arrival: float = 0.0
    mishaps: tuple[str, ...] = ()
    resumed: Resumed | None = None
    output: str = field(default="", repr=False)

    def problems(self, expected: Expected) -> list[str]:
        """Return what is not as a person expects."""
        found = list(self.mishaps)
        if self.code != expected.code:
            found.append(f"exit code {self.code}, not {expected.code}")
        found += [f"passes for whole and is not: {torn}" for torn in self.after.torn]
        found += self._saved_late() if expected.saves else self._saved_before(expected)
        if expected.workers is not None and any(n != expected.workers for n in self.workers):
            found.append(f"loader workers of the ranks: {self.workers}, not {expected.workers}")
        if expected.workers and not self.workers:
            found.append("no rank has loader workers")
        found += [f"orphan: {orphan}" for orphan in self.orphans]
        limit = LIMIT_SECONDS + self.arrival
        if self.seconds > limit:
            found.append(f"it took {self.seconds:.0f} seconds, not {limit:.0f} at most")
        if expected.resumes and self.resumed is None:
            found.append("it was not resumed")
        if self.resumed is not None:
            found += self.resumed.problems(self.after.saved)
        return found

    def _saved_late(self) -> list[str]:
        """Return what is wrong if the state of the last step is to be saved."""
        found = [f"not resumable: {self.after.wrong}"] if self.after.wrong else []
        last = max((steps[-1] for steps in self.made if steps), default=0)
        if any(steps != tuple(range(1, last + 1)) for steps in self.made):
            found.append(f"the ranks have made {[short(steps) for steps in self.made]}")
        if self.after.saved != last:
            found.append(f"the state of step {self.after.saved} is saved, not of {last}")
        if self.after.logged != tuple(range(1, last + 1)):
            found.append(f"rows of the steps {short(self.after.logged)}, not 1 to {last}")
        return found

    def _saved_before(self, expected: Expected) -> list[str]:
        """Return what is wrong if no state is to be saved but those before are to be kept."""
        found, every = [], expected.every_steps
        if every is None:
            if self.after.whole:
                found.append(f"the state of step {self.after.saved} is saved, not none")
            return found
        if not self.before.whole:
            found.append("there was no checkpoint before the signal")
        if self.after.wrong:
            found.append(f"not resumable: {self.after.wrong}")
        odd = [step for step in self.after.whole if step % every]
        if odd:
            found.append(f"the states of the steps {odd} are saved, none of which is due")
        kept = set(self.after.whole)
        newer = kept - set(self.before.whole)
        lost = sorted(set(self.before.whole) - kept)
        if len(kept) < len(self.before.whole) or len(lost) > len(newer):
            found.append(f"the states of the steps {lost} are no longer whole")
        if not kept or max(kept) < max(self.before.whole, default=0):
            found.append(f"the newest whole state is of step {self.after.saved}")
        if self.after.logged != tuple(range(1, len(self.after.logged) + 1)):
            found.append(f"rows of the steps {short(self.after.logged)}")
        return found

    def with_(self, **changes: object) -> Result:
        """Return it with some attributes changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def short(steps: tuple[int, ...]) -> str:
    """Return steps as a person writes them: "1 to 9"."""
    if len(steps) > 1 and steps == tuple(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps[-12:])) or "none"
