"""Sweeps: the jobs that Hydra's sweepers and launchers hand over, each examined where it runs.

A launcher may call the task in another process, which knows nothing of the one that began the
sweep. So the task is a plain value: it takes the overrides that Hydra gives a job, composes and
checks them as the parent does, trains, and leaves a small file with its exit code in a folder of
the sweep. Free of torch until a job starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from accel import parent_watch
from accel.errors import ConfigError, Problem, Problems
from runner.compose import composition, diagnose, hydra_setup
from runner.config import foreign_names
from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch import failures
from runner.run_dir.json_files import write_json
from runner.training.stopping import STOP_SIGNALS, handlers_restored

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from runner.compose.composition import Examined

BASIC = "basic"
LAUNCHERS = (BASIC, "joblib")  # tested with the runner
KINDS = ("launcher", "sweeper")
STOP_FILE = "stop"
# How long Ctrl-C waits for jobs in other processes to end by themselves.
INTERRUPT_SECONDS = 8.0


class JobFailed(Exception):
    """A job of a sweep failed; the error has been printed."""


@dataclass(frozen=True)
class Plan:
    """A sweep before its first job.

    `known` are the jobs that are known before the sweep begins, examined; of a sweeper that chooses
    its samples, one for each value that can be checked. `total` is None where the sweeper decides.
    """

    known: list[Examined]
    total: int | None
    launcher: str


def _no_resume(value: str) -> Problem:
    return Problem(value, "a sweep starts new runs", "Resume each run by itself.")


def plan(overrides: Sequence[str], config_name: str) -> Plan:
    """Examine the jobs of a sweep that are known in advance, inside a Hydra session.

    Raises:
        ConfigError: if the launcher or the sweeper cannot be used, or the sweep resumes a run.
    """
    if any(hydra_setup.key_of(override) == "resume" for override in overrides):
        raise ConfigError(_no_resume("resume with --multirun"))
    ConfigError.raise_if(diagnose.unreadable(overrides))
    ConfigError.raise_if(_not_installed(overrides))
    chosen = hydra_setup.hydra_choices(overrides, config_name)
    ConfigError.raise_if(_unverified(chosen["launcher"]))
    basic = chosen["sweeper"] == BASIC
    lists = hydra_setup.expand(overrides) if basic else hydra_setup.probes(overrides)
    known = [composition.new_run(job, config_name, number) for number, job in enumerate(lists)]
    if any(job.recipe is not None and job.recipe.resume is not None for job in known):
        raise ConfigError(_no_resume("resume: in a file, with --multirun"))
    ConfigError.raise_if(_shared_folders(known))
    return Plan(known, len(known) if basic else None, chosen["launcher"])


def _shared_folders(jobs: Sequence[Examined]) -> list[Problem]:
    """Return the problems of folders for checkpoints that several jobs of a sweep would share."""
    folders = [job.recipe.checkpoint.project.project_dir for job in jobs]
    counts = Counter(folder for folder in folders if folder is not None)
    return [
        Problem(
            f"checkpoint.project.project_dir={folder} with --multirun",
            f"a run has a folder of its own, and {number} jobs would share this one",
            "Leave it out: output_dir= moves the runs with their checkpoints.",
        )
        for folder, number in counts.items()
        if number > 1
    ]


def misplaced(overrides: Sequence[str]) -> list[Problem]:
    """Return the problems of overrides that only a sweep has a use for."""
    return [
        Problem(override, "launchers and sweepers are for sweeps", "Add -m, or leave it out.")
        for override in overrides
        if hydra_setup.key_of(override).replace("/", ".").startswith(HYDRA_NODES)
    ]


HYDRA_NODES = tuple(f"hydra.{kind}" for kind in KINDS)


def _not_installed(overrides: Sequence[str]) -> list[Problem]:
    problems = Problems()
    for override in overrides:
        key, _, name = override.partition("=")
        kind = key.rpartition("/")[2]
        if key != f"hydra/{kind}" or kind not in KINDS:
            continue
        known = diagnose.options_of(key)
        if name in known:
            continue
        if kind == "launcher" and name not in LAUNCHERS:
            problems += _unverified(name)
            continue
        remedy = f"Choose one of {', '.join(sorted(known))}."
        unknown = Problem(override, f"there is no such {kind} here", remedy)
        problems.append(foreign_names.plugin(key, name) or unknown)
    return [*problems, *hydra_setup.hydra_problems(overrides)]


def _unverified(launcher: str) -> list[Problem]:
    if launcher in LAUNCHERS:
        return []
    rule = f"the runner's jobs run under the launchers {' and '.join(LAUNCHERS)}"
    remedy = "Leave it out, or choose hydra/launcher=joblib."
    return [Problem(f"hydra/launcher={launcher}", rule, remedy)]


# -- one job -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """The task that Hydra calls with each job; it can be pickled to another process.

    Jobs leave their exit codes in `folder`. `parent` is the id of the process that began the sweep,
    `command` its command line. `total` is None where the sweeper decides, which then gets each
    job's metric. `log_levels` are those of loggers by name.
    """

    config_name: str
    folder: str
    parent: int
    command: tuple[str, ...] = ()
    total: int | None = None
    log_levels: tuple[tuple[str, str], ...] = ()

    def __call__(self, config: DictConfig) -> float | None:
        """Train the job that Hydra has composed.

        The config is not read: the recipe is composed from the job's overrides, and checked, in the
        same way as that of a single run.

        Returns:
            The monitored validation metric of the run; None to the basic sweeper.

        Raises:
            JobFailed: to a sweeper that chooses its own samples.
            SystemExit: in the process of the sweep, where it is to end.
        """
        from hydra.core.hydra_config import HydraConfig

        job = HydraConfig.get()
        number = int(job.job.num)
        overrides = [hydra_setup.closed(override) for override in job.overrides.task]
        own_process = os.getpid() == self.parent
        if (Path(self.folder) / STOP_FILE).exists():
            self._raise_to_sweeper("the sweep was stopped before this job")
            return None
        of_how_many = "" if self.total is None else f" of {self.total}"
        print(f"job {number + 1}{of_how_many}: {' '.join(overrides)}", flush=True)
        with contextlib.nullcontext() if own_process else self._in_launcher_process(number):
            code, run_dir = _attempt(overrides, self.config_name, number, dict(self.log_levels))
        self._write_code(number, code)
        if code in (STOPPED, INTERRUPTED):
            if own_process:
                raise SystemExit(code)
            (Path(self.folder) / STOP_FILE).touch()
        if code != DONE or run_dir is None:  # printed already
            self._raise_to_sweeper(f"job {number + 1} ended with exit code {code}")
            return None
        if self.total is not None:
            return None
        return self._objective(number, run_dir)

    def _objective(self, number: int, run_dir: Path) -> float:
        value = objective(run_dir)
        if value is not None:
            return value
        self._write_code(number, FAILED)
        problem = Problem(
            str(run_dir),
            "the sweeper chooses by a validation metric, and the run has measured none",
            "Give the data a validation split, or sweep over lists with the basic sweeper.",
        )
        print(problem, file=sys.stderr)
        raise JobFailed(str(problem))

    def _raise_to_sweeper(self, reason: str) -> None:
        """Raise to a sweeper that chooses its samples; the basic one starts the next job."""
        if self.total is None:
            raise JobFailed(reason)

    def _write_code(self, number: int, code: int) -> None:
        write_json(Path(self.folder, f"{number}.json"), code)

    @contextlib.contextmanager
    def _in_launcher_process(self, number: int) -> Iterator[None]:
        """Be a process of the launcher's: end with the parent, and stop when it says so."""
        parent_watch.die_with_ancestor(self.parent)
        sys.orig_argv[:] = self.command
        note = Path(self.folder, f"{number}.pid")
        with handlers_restored((*STOP_SIGNALS, signal.SIGINT)):
            for name in STOP_SIGNALS:
                signal.signal(name, _stop_here)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            note.write_text(str(os.getpid()), encoding="utf-8")
            try:
                yield
            finally:
                note.unlink(missing_ok=True)


def _stop_here(number: int, frame: FrameType | None) -> None:
    # While a job trains, signals go to its workers; this is before and after that.
    raise SystemExit(STOPPED)


def _attempt(
    overrides: Sequence[str], config_name: str, number: int, log_levels: Mapping[str, str]
) -> tuple[int, Path | None]:
    from runner.build import parts
    from runner.config import trust
    from runner.launch import start_run

    claimed: list[Path] = []
    try:
        missing = trust.missing_packages()
        with hydra_setup.session():
            examined = composition.new_run(overrides, config_name, number)
        parts.require([examined], missing)
        code = start_run.start(
            examined.recipe,
            examined.overrides,
            examined.config_name,
            fresh=True,
            on_claimed=claimed.append,
            log_levels=log_levels,
        )
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:
        code = STOPPED if end.code == STOPPED else FAILED  # not even 0: it is not complete
    except Exception as error:
        code = failures.report(error)
    return code, claimed[0] if claimed else None


def objective(run_dir: Path) -> float | None:
    """Return the best value of a run's monitored validation metric, else its last; None: none."""
    from runner.run_dir.json_files import SUMMARY

    summary = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
    if summary["best"] is not None:
        return float(summary["best"]["value"])
    value = summary["metrics"].get("validation", {}).get(summary["monitor"])
    return None if value is None else float(value)


# -- the sweep -----------------------------------------------------------------------------


@contextlib.contextmanager
def stops_forwarded(folder: Path, launcher: str) -> Iterator[None]:
    """Hand stop signals and Ctrl-C on to jobs in other processes, and let no further one begin."""
    if launcher == BASIC:  # a job's own launcher listens
        yield
        return

    def forward(number: int, frame: FrameType | None = None) -> None:
        (folder / STOP_FILE).touch()
        for note in folder.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                os.kill(int(note.read_text(encoding="utf-8")), number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        forward(number)
        deadline = time.monotonic() + INTERRUPT_SECONDS
        while any(folder.glob("*.pid")) and time.monotonic() < deadline:
            time.sleep(0.05)
        raise KeyboardInterrupt

    with handlers_restored((*STOP_SIGNALS, signal.SIGINT)) as before:
        for number in STOP_SIGNALS:
            signal.signal(number, forward)
        # A background job of a shell ignores Ctrl-C.
        if before[signal.SIGINT] is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
        yield


def conclude(folder: Path, total: int | None) -> int:
    """Print which jobs of a sweep failed, and return the exit code of the sweep.

    The jobs left their exit codes in `folder`. There should be `total`; None: as many as there are.
    """
    codes = {
        int(path.stem): int(json.loads(path.read_text(encoding="utf-8")))
        for path in folder.glob("*.json")
    }
    stopped = [code for code in codes.values() if code in (STOPPED, INTERRUPTED)]
    if stopped or (folder / STOP_FILE).exists():
        return max(stopped, default=STOPPED)
    for number in range(total or 0):  # its process died without writing a code
        codes.setdefault(number, FAILED)
    failed = sorted(number + 1 for number, code in codes.items() if code != DONE)
    if failed:
        numbers = ", ".join(map(str, failed))
        print(f"{len(failed)} of {len(codes)} jobs failed: {numbers}", file=sys.stderr)
    return max(codes.values(), default=FAILED)
