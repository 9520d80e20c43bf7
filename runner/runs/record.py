"""Runs below folders, each as its files describe it. Free of torch and OmegaConf.

A thousand runs are listed in seconds: of a recipe, only the nodes that are asked for are parsed.
Nothing is written, nothing imported; a file that is damaged or missing is said in `problems`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import CheckpointError, ConfigError, Problem
from runner import exit_codes
from runner.runs import environment, json_files, lock, provenance, sessions
from runner.runs.json_files import (
    METRICS,
    SWEEP,
    TIME_IS_UP,
    WEIGHTS_STEP,
    Fields,
    JsonObject,
    number,
)
from runner.runs.sessions import CONFIG, JOB

RUNNING, FINISHED, STOPPED = "running", "finished", "stopped"
FAILED, CUT_OFF, PRUNED, BROKEN = "failed", "interrupted", "pruned", "broken"
SUBMITTED = "submitted"  # to Slurm, and not begun
STATUSES = (RUNNING, SUBMITTED, FINISHED, STOPPED, FAILED, CUT_OFF, PRUNED, BROKEN)
ENDED_WITH = {exit_codes.FAILED: FAILED, exit_codes.REFUSED: FAILED, exit_codes.STOPPED: STOPPED}
CODE = "code"  # a key beside those of recipes
TAIL_BYTES = 8192
DEFAULT_FOLDER = "runs"
DEPTH = 6  # of runs below a folder
NO_RUNS = ("tensorboard", "logs")  # folders of a sweep, of a folder for each job
MISSING = object()
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STAMPED = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_NUMBERED = re.compile(r"\d{4,}")
_NODE = re.compile(r"^([A-Za-z_]\w*):", re.MULTILINE)


@dataclass(frozen=True)
class Objective:
    """The value that a run is judged by: the best, or the last measured, of a monitored metric.

    Attributes:
        metric: its name.
        mode: "min" or "max", which is better.
        value: as measured on the validation set.
    """

    metric: str
    mode: str
    value: float


class RunRecord:
    """One run directory, read lazily.

    Attributes:
        path: the run directory.
        sweep: the name of the directory of its sweep; None: it is no job of one.
    """

    def __init__(self, path: Path, sweep: str | None = None) -> None:
        self.path = path
        self.sweep = sweep
        self._problems: list[str] = []
        self._nodes: JsonObject = {}

    @property
    def problems(self) -> list[str]:
        """What is damaged or could not be read, a sentence each."""
        self._examine()
        return list(self._problems)

    def _examine(self) -> None:
        """Read every file, so that each problem is noted."""
        _ = self.recipe_text, self.job, self.ended, self.environment, self.evaluations
        _ = self.last, self.status, self.objective, self.recipe

    # -- the recipe ------------------------------------------------------------------------

    @cached_property
    def job(self) -> Fields:
        """The content of job.json; empty where it is damaged."""
        return self._json(JOB)

    @cached_property
    def recipe_text(self) -> str:
        """The recipe as YAML; empty where it is lost."""
        content = None if self.session is None else self._content(self.session / CONFIG)
        text = (content or b"").decode("utf-8", errors="replace")
        if not _NODE.search(text):
            file = (self.session or self.path) / CONFIG
            self._note(f"{file.relative_to(self.path)} is missing or no recipe")
        return text

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Begin and end of the text of each node of the recipe."""
        found = [(match[1], match.start()) for match in _NODE.finditer(self.recipe_text)]
        ends = [*(start for _, start in found), len(self.recipe_text)][1:]
        return {name: (at, end) for (name, at), end in zip(found, ends, strict=True)}

    def node(self, name: str) -> Any:
        """Return a node of the recipe as plain containers; `MISSING` where there is none."""
        if name not in self._nodes:
            self._nodes[name] = self._parse(name) if name in self._places else MISSING
        return self._nodes[name]

    def _parse(self, name: str) -> Any:
        start, end = self._places[name]
        try:
            return yaml.load(self.recipe_text[start:end], _LOADER)[name]
        except (yaml.YAMLError, TypeError, KeyError) as error:
            reason = next(iter(str(error).splitlines()), "")
            self._note(f"{CONFIG} is damaged at {name} ({reason})")
            return MISSING

    def value(self, key: str) -> Any:
        """Return the value at a dotted key of the recipe; `MISSING` where it has no such key.

        The key `CODE`, which no recipe has, is that of `code`.
        """
        if key == CODE:
            return self.code
        name, *rest = key.split(".")
        found = self.node(name)
        for part in rest:
            if not isinstance(found, Mapping) or part not in found:
                return MISSING
            found = found[part]
        return found

    @cached_property
    def recipe(self) -> JsonObject:
        """The recipe as plain containers, as far as it can be read."""
        nodes = {name: self.node(name) for name in self._places}
        return {name: node for name, node in nodes.items() if node is not MISSING}

    @property
    def has_recipe(self) -> bool:
        """Whether the recipe can be read as a whole, so that its keys can be compared."""
        return self.status != BROKEN and len(self.recipe) == len(self._places)

    @property
    def name(self) -> str:
        """The name of the run; without a recipe, that of the folder that it lies in."""
        found = self.value("name")
        return found if isinstance(found, str) else self.path.parent.name

    @property
    def tags(self) -> list[str]:
        """The tags of the run."""
        found = self.value("tags")
        return [str(tag) for tag in found] if isinstance(found, list) else []

    # -- its course ------------------------------------------------------------------------

    @cached_property
    def session(self) -> Path | None:
        """The folder of the session whose recipe is the run's; None: it is no run."""
        return sessions.current(self.path)

    @cached_property
    def ended(self) -> Fields:
        """How the newest session with a step ended, else the newest; empty: it did not."""
        folder = sessions.last(self.path)
        return {} if folder is None else self._loaded(folder / sessions.ENDED)

    @cached_property
    def tried(self) -> Fields:
        """How its newest session ended, one without a step, too; empty: it did not."""
        newest = sessions.of_run(self.path)[-1:]
        return self._loaded(newest[0] / sessions.ENDED) if newest else {}

    @property
    def is_done(self) -> bool:
        """Whether it came to the end that it was given: nothing is left of its command.

        This is the one definition of finished. A limit of time (`trainer.max_time`) is an end: a
        sweep would train such a job with each command, and a search never be complete.
        """
        summary = self.ended.get("summary") or {}
        return self.ended.get("code") == exit_codes.DONE or summary.get("stopped") == TIME_IS_UP

    @cached_property
    def summary(self) -> Fields:
        """The newest summary that a session of it has; empty: none has."""
        if found := self.ended.get("summary"):
            return dict(found)
        for folder in reversed(sessions.begun(self.path)):
            if found := self._loaded(folder / sessions.ENDED).get("summary"):
                return dict(found)
        return {}

    @cached_property
    def environment(self) -> Fields:
        """The content of environment.json; empty where there is none."""
        return self._json(environment.FILE)

    @cached_property
    def code(self) -> str:
        """A short name of the code of its newest session: equal for equal code."""
        return provenance.code_id(self.environment) or "unknown"

    @cached_property
    def evaluations(self) -> list[Fields]:
        """What `runner eval` has measured, oldest first."""
        found = self._loaded(self.path / json_files.EVALUATIONS)
        return list(found.get("evaluations") or ())

    @cached_property
    def holder(self) -> lock.Holder | None:
        """Who trains in it; None: nobody."""
        return lock.holder(self.path)

    @cached_property
    def started(self) -> float:
        """When its session was started, in seconds since the epoch; 0: it is not known."""
        return number(self.environment.get("started")) or 0.0

    @property
    def failure(self) -> Fields:
        """How the first process that failed in the newest session ended; empty: none did."""
        return self.tried.get("cause") or {}

    @cached_property
    def status(self) -> str:
        """One of `STATUSES`."""
        summary = self.ended.get("summary") or {}
        if summary.get("complete") is not True and self.holder is not None:
            return RUNNING
        if not self._places:
            return BROKEN
        if summary.get("stopped") == PRUNED:
            return PRUNED
        waits = not self.tried and sessions.is_submitted(self.path)
        if waits and summary.get("complete") is not True:
            return SUBMITTED
        if summary:
            return FINISHED if summary["complete"] is True else STOPPED
        if self.ended:
            return ENDED_WITH.get(self.ended["code"], CUT_OFF)
        return CUT_OFF

    @property
    def reason(self) -> str:
        """Why the run is in its status, in a few words; may be empty."""
        if self.status == RUNNING:
            return str(self.holder)
        if self.status == BROKEN:
            return "; ".join(dict.fromkeys(self.problems))
        if self.status == SUBMITTED:
            return f"Slurm's job {sessions.submitted_job(self.path)} has not begun"
        if self.status == FAILED:
            return str((self.ended.get("cause") or {}).get("message") or "")
        if self.status == CUT_OFF:
            return "it was ended without saving: by Ctrl-C, a kill, or a loss of power"
        return str(self.summary.get("reason") or "")

    @cached_property
    def last(self) -> Fields:
        """The newest record of metrics.jsonl; empty where there is none."""
        for line in self.tail():
            with contextlib.suppress(ValueError):
                return json_files.loads(line)
        return {}

    @property
    def step(self) -> int | None:
        """Optimizer steps made, as far as is known."""
        settled = self.summary if self.status in (FINISHED, STOPPED, PRUNED) else self.last
        found = settled.get("step")
        return self.summary.get("step") if found is None else found

    @property
    def seconds(self) -> float | None:
        """Time spent on the run, over all attempts."""
        settled = self.status in (FINISHED, STOPPED, PRUNED)
        return number(self.summary.get("seconds") if settled else self.last.get("time"))

    @cached_property
    def objective(self) -> Objective | None:
        """The best value of the monitored metric, else the last; None: none is known."""
        best = (self.summary.get("best") if not self._is_behind else None) or {}
        if best.get("value") is None:
            best = self._best_saved()
        metric = str(best.get("metric") or self.summary.get("monitor") or "")
        mode = best.get("mode") or self.summary.get("mode")
        value = best.get("value")
        if value is None:
            measured = (self.summary.get("metrics") or {}).get("validation") or {}
            value = measured.get(metric)
        value = number(value)
        return None if value is None or not metric else Objective(metric, str(mode), value)

    def _best_saved(self) -> Fields:
        """Return what the newest readable checkpoint says of the best state; empty: nothing."""
        for path in reversed(checkpoints.checkpoints(self.path / checkpoints.FOLDER)):
            with contextlib.suppress(CheckpointError):
                metadata = checkpoints.read_manifest(path).metadata
                return {**(metadata.get("best") or {}), "mode": metadata.get("mode")}
        return {}

    @property
    def _is_behind(self) -> bool:
        """Whether the summary is of an earlier attempt than the newest."""
        return self.status in (RUNNING, CUT_OFF, FAILED)

    # -- files -----------------------------------------------------------------------------

    def tail(self) -> list[bytes]:
        """Return the last lines of metrics.jsonl, newest first."""
        try:
            with (self.path / METRICS).open("rb") as file:
                start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
                file.seek(start)
                return file.read().splitlines()[start > 0 :][::-1]  # the first may be cut
        except OSError:
            return []

    def records(self) -> Iterator[Fields]:
        """Yield the records of metrics.jsonl, oldest first; lines that are damaged are skipped.

        The step of the weights that were tested is no measurement, and is left out.
        """
        with contextlib.suppress(OSError), (self.path / METRICS).open("rb") as file:
            for number_, line in enumerate(file, start=1):
                try:
                    record = json_files.loads(line)
                except ValueError:
                    if line.endswith(b"\n"):  # else it was cut off by a kill
                        self._note(f"{METRICS} is damaged at line {number_}")
                    continue
                yield {k: v for k, v in record.items() if k != WEIGHTS_STEP}

    def _json(self, name: str) -> Fields:
        """Return what a JSON file of the run's session holds; empty where there is none."""
        return {} if self.session is None else self._loaded(self.session / name)

    def _loaded(self, path: Path) -> Fields:
        """Return what a JSON file below the run directory holds; empty where there is none."""
        content = self._content(path)
        try:
            return {} if content is None else json_files.loads(content)
        except ValueError as error:
            self._note(f"{path.relative_to(self.path)} is damaged ({error})")
            return {}

    def _content(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(f"{path.name} cannot be read ({error.strerror})")
            return None

    def _note(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.append(problem)


# -- runs below folders --------------------------------------------------------------------


def find_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunRecord]:
    """Return the runs that lie in folders or below, jobs of sweeps among them, each once.

    A directory that is named as those of runs and has no recipe is one of them, too: it is broken.

    Raises:
        ConfigError: naming each folder that is not there.
    """
    problems: list[Problem] = []
    found: dict[str, RunRecord] = {}
    for folder in folders:
        path = Path(os.path.abspath(os.path.expanduser(folder)))
        if not path.is_dir():
            rule = "it is a file" if path.exists() else "there is no such folder"
            remedy = "Name a run, a sweep, or a folder of runs such as runs/digits."
            problems += ConfigError.of(os.fspath(folder), rule, remedy).problems
            continue
        for run in _walk(path, DEPTH):
            found.setdefault(os.path.realpath(run.path), run)
    ConfigError.raise_if(problems)
    return list(found.values())


def require_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunRecord]:
    """Return the runs of folders as `find_runs`, each folder having at least one.

    Raises:
        ConfigError: naming each folder that is not there, or has no run.
    """
    found: dict[str, RunRecord] = {}
    problems: list[Problem] = []
    for folder in folders:
        runs = find_runs([folder])
        if not runs:
            rule = f"no run lies there: a run directory holds {sessions.FOLDER}"
            remedy = "Name a run, a sweep, or a folder of runs; runner list shows those in runs."
            problems += ConfigError.of(os.fspath(folder), rule, remedy).problems
        found |= {str(run.path): run for run in runs if str(run.path) not in found}
    ConfigError.raise_if(problems)
    return list(found.values())


def _walk(path: Path, depth: int) -> Iterator[RunRecord]:
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError:  # not ours to read
        return
    names = {entry.name for entry in entries}
    if sessions.FOLDER in names or _STAMPED.fullmatch(path.name):
        of_sweep = _NUMBERED.fullmatch(path.name) and (path.parent / SWEEP).is_file()
        yield RunRecord(path, path.parent.name if of_sweep else None)
        return
    folders = [entry for entry in entries if entry.name[0] != "." and entry.is_dir()]
    if SWEEP in names:
        for entry in folders:
            if _NUMBERED.fullmatch(entry.name):
                yield RunRecord(Path(entry.path), path.name)
            elif depth > 0 and entry.name not in NO_RUNS:  # another sweep may lie there
                yield from _walk(Path(entry.path), depth - 1)
        return
    if depth > 0:
        for entry in folders:
            yield from _walk(Path(entry.path), depth - 1)
