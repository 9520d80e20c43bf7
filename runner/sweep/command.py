"""``runner -m``: from a command line to a sweep that has run, and its table."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore

from accel.machine import passwords
from accel.machine.errors import ConfigError, Problem
from runner.exit_codes import FAILED, INTERRUPTED, REFUSED, STOPPED
from runner.launch import failures
from runner.recipe import hydra_setup, launchers, serialization, sweepers
from runner.recipe.composition import Examined
from runner.recipe.schema import Recipe
from runner.sweep import (
    directory,
    finished,
    jobs,
    settings,
    slurm,
    table,
    task,
)
from runner.sweep.directory import Description, Sweep
from runner.sweep.jobs import Choice
from runner.sweep.live import Live
from runner.sweep.settings import Settings

if TYPE_CHECKING:
    from runner.sweep.fork_server import ForkServer

Require = Callable[[Sequence[Examined]], object]
Hydra = Callable[[Sequence[str], task.Task], int]


@dataclass(frozen=True)
class Request:
    """A command line of a sweep: overrides of the recipes, and settings of the sweep."""

    overrides: tuple[str, ...]
    given: tuple[str, ...]
    config_name: str
    settings: Settings

    @classmethod
    def of(cls, overrides: Sequence[str], config_name: str) -> Request:
        """Return the request of a command line; raises a ConfigError for wrong settings."""
        found, rest = settings.take(overrides)
        return cls(tuple(rest), tuple(overrides), config_name, found)


def examine(request: Request, check: Require) -> list[Examined]:
    """Compose the jobs of a sweep that are known in advance.

    Args:
        request: the command.
        check: raises what is wrong with jobs that can be found without torch.

    Raises:
        ConfigError: if the launcher or the sweeper cannot be used, or the sweep resumes a run.
    """
    with hydra_setup.session(request.overrides):
        choice = jobs.choose(request.overrides, request.config_name, request.settings)
        lists = jobs.lists(request.overrides, choice, request.settings)
        jobs.require_one_plan(lists, request.overrides, request.config_name)
        found = jobs.examine(lists, request.config_name)
    check(found)
    _search(request, choice, found)
    return found


def note(request: Request) -> str:
    """Return what to know of jobs that `examine` returns; empty: they are those of the sweep."""
    with hydra_setup.session(request.overrides):
        choice = jobs.choose(request.overrides, request.config_name, request.settings)
    return "" if choice.known else f"{choice.sweeper} chooses the jobs; these have been checked."


# -- a sweep that is begun, or continued ---------------------------------------------------


@dataclass(frozen=True)
class _Known:
    """The jobs of a command; `sweep`: an earlier command has begun it."""

    choice: Choice
    first: Examined
    examined: list[Examined] | None
    description: Description | None
    sweep: Sweep | None


def train(request: Request, check: Require, require: Require, hydra: Hydra) -> int:
    """Run a sweep to its end, and return the exit code of the command.

    Args:
        request: the command.
        check: raises what is wrong with jobs that can be found without torch.
        require: raises everything that is wrong with jobs.
        hydra: runs Hydra's main with a command line and a task.
    """
    over = finished.find(request.given, request.config_name, request.settings)
    if over is not None:
        check([])
        return table.nothing_left(over, request.config_name)
    with contextlib.ExitStack() as stack:
        server = _Server(stack)
        known = _known(request, check, server)
        jobs.require_cluster(known.choice)
        sweep = known.sweep
        if known.choice.known and sweep is not None and not sweep.pending():
            return table.nothing_left(sweep, request.config_name)
        require(_to_require(known, sweep))
        jobs.require_place(known.choice, request.overrides)
        if sweep is None:
            assert known.description is not None
            recipe = known.first.recipe
            sweep = directory.create(request.settings.dir, recipe, known.description)
        numbers = sweep.pending()
        print(f"sweep: {sweep.path}{_of_how_many(sweep, numbers)}", flush=True)
        code = _run(request, known, sweep, numbers, server, hydra)
        if known.sweep is None and request.settings.dir is None and code == REFUSED:
            _remove_unstarted(sweep)
        return code


def _remove_unstarted(sweep: Sweep) -> None:
    """Remove the directory that this command has made, if no job was started in it."""
    if not sweep.started() and not any(sweep.path.glob(f"{task.CONTROL}*")):
        shutil.rmtree(sweep.path, ignore_errors=True)


class _Server:
    """The fork server of a command, started when it is known that there are jobs for it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._server: ForkServer | None = None

    def get(self) -> ForkServer:
        """Start it, unless it is running; it ends with the command."""
        if self._server is None:
            from runner.sweep.fork_server import ForkServer

            self._server = ForkServer()
            self._stack.callback(self._server.close)
        return self._server


def _known(request: Request, check: Require, server: _Server) -> _Known:
    """Compose the jobs, unless an earlier command has done so from the same files."""
    chosen, name = request.settings, request.config_name
    digest = directory.digest_of(name, request.given)
    with hydra_setup.session(request.overrides):
        choice = jobs.choose(request.overrides, name, chosen)
        lists = jobs.lists(request.overrides, choice, chosen)
        if not lists:
            raise ConfigError.of("--multirun", "the sweep has no jobs", "Give key=a,b,c.")
        (first,) = jobs.examine(lists[:1], name)
        here = finished.fingerprint()
        found = None if first.problems else directory.place_of(chosen.dir, first.recipe, digest)
        sweep = None if found is None else directory.read(found)
        if sweep is not None:
            ordered = _in_the_order_of(sweep, request)
            if ordered.overrides != request.overrides:
                lists = jobs.lists(ordered.overrides, choice, ordered.settings)
        if sweep is not None and _is_current(sweep, here, lists, choice):
            check([first])
            return _Known(choice, first, None, None, sweep)
        jobs.require_one_plan(lists, request.overrides, name)
        if choice.is_local and not first.problems:
            server.get()  # it imports while the other jobs are composed
        examined = jobs.examine(lists, name)
    check(examined)
    search = _search(request, choice, examined)
    described = _described(request, choice, examined, digest, here, search)
    if sweep is not None:
        directory.require_unchanged(sweep, described)
    return _Known(choice, first, examined, described, sweep)


def _in_the_order_of(sweep: Sweep, request: Request) -> Request:
    """Return the request with its overrides as they stood in the command that began the sweep."""
    there = [one for one in sweep.description.overrides if not directory.is_scheduling(one)]
    here = [one for one in request.given if directory.is_scheduling(one)]
    return Request.of([*there, *here], request.config_name)


def _is_current(
    sweep: Sweep, here: str | None, lists: Sequence[Sequence[str]], choice: Choice
) -> bool:
    """Return whether the recipes of a sweep are what would be composed now."""
    there = sweep.description
    if not choice.known or not finished.are_of(there, here):
        return False
    return [list(job.overrides) for job in there.jobs] == [list(one) for one in lists]


def _search(request: Request, choice: Choice, examined: Sequence[Examined]) -> dict[str, Any]:
    """Return the settings of a search that it keeps; empty: there is none, or no recipe.

    Raises:
        ConfigError: if its direction is not that of the recipe.
    """
    if not choice.is_search or examined[0].problems:
        return {}
    from runner.sweep.optuna import settings as of_search  # needs Optuna

    name, recipe = request.config_name, examined[0].recipe
    digest = directory.digest_of(name, request.given)
    with hydra_setup.session(request.overrides):
        return of_search.recorded(request.overrides, name, recipe, f"{recipe.name}-{digest}")


def _described(
    request: Request,
    choice: Choice,
    examined: Sequence[Examined],
    digest: str,
    here: str | None,
    search: Mapping[str, Any] | None = None,
) -> Description:
    plain = [serialization.frozen_plain(job.recipe) for job in examined]
    if any("${" in o for o in (*request.given, *(o for job in examined for o in job.overrides))):
        here = None
    listed = [
        directory.known_job(number, job.overrides, recipe, plain[0])
        for number, (job, recipe) in enumerate(zip(examined, plain, strict=True))
    ]
    return Description(
        command=passwords.shown(sys.orig_argv),
        cwd=os.getcwd(),
        config_name=request.config_name,
        overrides=list(request.given),
        sweeper=choice.sweeper,
        launcher=choice.launcher,
        digest=digest,
        version=finished.version(),
        sources=here,
        time=time.time(),
        recipe=plain[0],
        jobs=listed if choice.known else [],
        search=dict(search or {}),
    )


def _to_require(known: _Known, sweep: Sweep | None) -> list[Examined]:
    if known.examined is not None:
        return known.examined
    assert sweep is not None
    listed, name = sweep.description.jobs, sweep.description.config_name
    recipes = ((number, sweep.recipe(number)) for number in sweep.pending())
    return [
        Examined(recipe, [], listed[number].overrides, name) for number, recipe in recipes if recipe
    ]


def _of_how_many(sweep: Sweep, numbers: Sequence[int]) -> str:
    total = len(sweep.description.jobs)
    done = total - len(numbers)
    before = f", {done} are finished" if done else ""
    return f" ({total} jobs{before})" if total else ""


# -- running -------------------------------------------------------------------------------


def _run(
    request: Request,
    known: _Known,
    sweep: Sweep,
    numbers: tuple[int, ...],
    server: _Server,
    hydra: Hydra,
) -> int:
    choice, before = known.choice, _sessions(sweep)
    total = len(sweep.description.jobs) if choice.known else None
    done = total - len(numbers) if total else len(sweep.started())
    with hydra_setup.session():
        levels = hydra_setup.log_levels(request.overrides)
    with task.control_folder(sweep.path) as control, contextlib.ExitStack() as stack:
        local = None
        if choice.is_watched:
            alone = choice.is_local and request.settings.jobs == 1
            common = _common(sweep, known.examined or ())
            live = Live(sweep.path, total, done, alone=alone, common=common)
            stack.callback(live.close)
            forks = server.get() if choice.is_local else None
            local = task.Local(forks, live, request.settings.jobs)
        else:
            stack.enter_context(task.stops_forwarded(control))
        called = task.Task(
            folder=str(sweep.path),
            control=str(control),
            config_name=request.config_name,
            parent=os.getpid(),
            host=platform.node(),
            is_detached=choice.launcher == slurm.LAUNCHER,
            command=tuple(sys.orig_argv),
            numbers=numbers if choice.known else None,
            log_levels=tuple(levels.items()),
            local=local,
        )
        code = FAILED
        try:
            code = hydra(_line(request, choice, sweep), called)
        except task.JobFailed as error:  # the sweeper gave up
            print(error, file=sys.stderr, flush=True)
            code = FAILED
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:  # of the launcher or the sweeper
            code = failures.report(error)
        stack.close()
        if code == REFUSED and _sessions(sweep) == before:
            return code
        stopped = code in (STOPPED, INTERRUPTED) or (control / task.STOP_FILE).exists()
        ended = table.conclude(sweep, request.config_name, is_stopped=stopped)
        if stopped:
            return code if code in (STOPPED, INTERRUPTED) else STOPPED
        # A search that is refused after its first jobs has failed.
        return FAILED if {code, ended} & {FAILED, REFUSED} else max(code, ended)


def _sessions(sweep: Sweep) -> set[Path]:
    """Return the sessions of all jobs."""
    return set(sweep.path.glob("[0-9]*/sessions/*"))


def _common(sweep: Sweep, examined: Sequence[Examined]) -> set[str]:
    """Return the overrides that all jobs have: known ones, or those `examined` for a sweeper."""
    jobs = [job.overrides for job in sweep.description.jobs]
    own = [set(job) for job in jobs or [one.overrides for one in examined]]
    return set.intersection(*own) if len(own) > 1 else set()


def _line(request: Request, choice: Choice, sweep: Sweep) -> list[str]:
    """Return Hydra's command line."""
    _store_own()
    overrides = hydra_setup.without_levels(request.overrides)
    given = [one for one in overrides if not _names_plugin(one)]
    line = ["--config-name", request.config_name, "--multirun"]
    launcher = jobs.LOCAL if choice.is_local else choice.launcher
    sweeper = jobs.KNOWN if choice.known else choice.sweeper
    chosen = [f"hydra/launcher={launcher}", f"hydra/sweeper={sweeper}"]
    with hydra_setup.session():
        own = [*hydra_setup.for_hydra(given), *hydra_setup.FIXED]
    where = [f"hydra.sweep.dir='{sweep.path}'", "hydra.sweep.subdir=."]
    if launcher == slurm.LAUNCHER:
        name = str(sweep.description.recipe["name"])
        target = f"hydra.launcher._target_={launchers.MODULE}.SlurmLauncher"
        where += [target, f"hydra.job.name='{name}'"]
    return [*line, *own, *chosen, *where]


def _store_own() -> None:
    """Make the launcher of this machine and the sweeper of known jobs known to Hydra."""
    store = ConfigStore.instance()
    here = {"_target_": f"{launchers.MODULE}.LocalLauncher"}
    store.store(group=launchers.GROUP, name=jobs.LOCAL, node=here, provider="runner")
    known = {"_target_": f"{sweepers.MODULE}.KnownJobs", "max_batch_size": None, "params": None}
    store.store(group=sweepers.GROUP, name=jobs.KNOWN, node=known, provider="runner")


def _names_plugin(override: str) -> bool:
    return hydra_setup.key_of(override) in ("hydra/launcher", "hydra/sweeper")


# -- listing -------------------------------------------------------------------------------


def listing(examined: Sequence[Examined], problems: Sequence[Problem] = ()) -> list[str]:
    """Return a line for each job: its number, and the overrides that differ between jobs."""
    ConfigError.raise_if(list(problems))
    common = set.intersection(*(set(job.overrides) for job in examined)) if examined else set()
    lines = [
        f"{len(examined)} jobs; all have: {' '.join(_in_order(examined, common)) or 'nothing'}"
    ]
    for number, job in enumerate(examined):
        own = [one for one in job.overrides if one not in common]
        lines.append(f"{number:04}  {' '.join(own)}".rstrip())
    return lines


def _in_order(examined: Sequence[Examined], common: set[str]) -> list[str]:
    return [one for one in examined[0].overrides if one in common]


def recipe_lines(examined: Sequence[Examined]) -> Iterator[str]:
    """Yield the first job's recipe, and for each other job the keys whose values differ."""
    from runner.recipe import resumed_recipe

    first = serialization.to_plain(_recipe(examined[0]))
    for number, job in enumerate(examined):
        here = serialization.to_plain(_recipe(job))
        found = resumed_recipe.differences(first, here)
        yield f"# {number:04}  {' '.join(job.overrides)}".rstrip()
        yield from (f"{key}: {value}" for key, _, value in found)


def _recipe(examined: Examined) -> Recipe:
    ConfigError.raise_if(examined.problems)
    return examined.recipe
