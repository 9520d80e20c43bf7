"""``runner -m``: from a command line to a sweep that has run, and its table."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore

from accel.machine import passwords
from accel.machine.errors import ConfigError
from runner.exit_codes import FAILED, INTERRUPTED, REFUSED, STOPPED
from runner.launch import failures
from runner.launch.group import stops_heard
from runner.recipe import hydra_setup, plugins, serialization
from runner.recipe.composition import Examined
from runner.sweep import job, plan, table
from runner.sweep import sweep as sweeps
from runner.sweep.live import Live
from runner.sweep.plan import Choice, Settings
from runner.sweep.sweep import Description, Sweep

if TYPE_CHECKING:
    from runner.launch.fork_server import ForkServer

Require = Callable[[Sequence[Examined]], object]
Hydra = Callable[[Sequence[str], job.Task], int]
Server = Callable[[], "ForkServer"]  # started when it is known that there are jobs for it


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
        found, rest = plan.take(overrides)
        return cls(tuple(rest), tuple(overrides), config_name, found)


def examine(request: Request, check: Require) -> tuple[list[Examined], str]:
    """Compose the jobs of a sweep that are known in advance.

    Args:
        request: the command.
        check: raises what is wrong with jobs that can be found without torch.

    Returns:
        The jobs, and what to know of them; empty: they are those of the sweep.

    Raises:
        ConfigError: if the launcher or the sweeper cannot be used, or the sweep resumes a run.
    """
    with hydra_setup.session(request.overrides):
        choice = plan.choose(request.overrides, request.config_name, request.settings)
        lists = plan.lists(request.overrides, choice, request.settings)
        plan.require_one_plan(choice, lists, request.overrides, request.config_name)
        found = plan.examine(lists, request.config_name)
        check(found)
        _search(request, choice, found)
    chooses = f"{choice.sweeper} chooses the jobs; these have been checked."
    return found, "" if choice.known else chooses


# -- a sweep that is begun, or continued ---------------------------------------------------


def train(request: Request, check: Require, require: Require, hydra: Hydra) -> int:
    """Run a sweep to its end, and return the exit code of the command.

    Args:
        request: the command.
        check: raises what is wrong with jobs that can be found without torch.
        require: raises everything that is wrong with jobs.
        hydra: runs Hydra's main with a command line and a task.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def server() -> ForkServer:
            from runner.launch.fork_server import ForkServer

            return stack.enter_context(contextlib.closing(ForkServer()))

        with hydra_setup.session(request.overrides):
            choice = plan.choose(request.overrides, request.config_name, request.settings)
            plan.require_cluster(choice)
            sweep, examined, described = _composed(request, choice, check, server)
        is_equal = described is None
        if sweep and choice.known and not (examined if is_equal else sweep.pending()):
            return table.nothing_left(sweep, request.config_name)
        require(examined)
        plan.require_place(choice)
        is_new = sweep is None
        if sweep is None:
            assert described is not None
            sweep = sweeps.create(request.settings.dir, examined[0].recipe, described)
        code = _run(request, choice, sweep, examined, server, hydra)
        if is_new and request.settings.dir is None and code == REFUSED and not sweep.started():
            sweeps.discard(sweep)
        return code


def _composed(
    request: Request, choice: Choice, check: Require, server: Server
) -> tuple[Sweep | None, list[Examined], Description | None]:
    """Compose the jobs, inside a session, unless an earlier command has done so from equal files.

    Returns:
        The sweep that the command continues, its jobs, and what there is to say of them; None:
        there is no sweep, or nothing was composed.
    """
    name = request.config_name
    lists = plan.lists(request.overrides, choice, request.settings)
    if not lists:
        raise ConfigError.of("--multirun", "the sweep has no jobs", "Give key=a,b,c.")
    (first,) = plan.examine(lists[:1], name)
    digest, sweep = plan.digest_of(name, request.given), None
    if not first.problems:
        sweep = sweeps.find(request.settings.dir, first.recipe, digest)
    given = [*request.given, *(one for overrides in lists for one in overrides)]
    here = sweeps.sources(given) if choice.known else None
    if sweep is not None and here is not None and sweep.description.is_of(here, lists):
        check([first])
        return sweep, sweep.examined(), None
    plan.require_one_plan(choice, lists, request.overrides, name)
    if choice.is_local and not first.problems:
        server()  # it imports while the other jobs are composed
    examined = plan.examine(lists, name)
    check(examined)
    plain = [serialization.frozen_plain(one.recipe) for one in examined]
    known = [sweeps.known_job(*one, plain[0]) for one in zip(lists, plain, strict=True)]
    described = Description(
        command=passwords.shown(sys.orig_argv),
        config_name=name,
        overrides=[one for one in request.given if not plan.is_scheduling(one)],
        digest=digest,
        sources=here,
        time=time.time(),
        recipe=plain[0],
        jobs=known if choice.known else [],
        search=_search(request, choice, examined),
    )
    if sweep is not None:
        sweeps.require_unchanged(sweep, described)
    return sweep, examined, described


def _search(request: Request, choice: Choice, examined: Sequence[Examined]) -> dict[str, Any]:
    """Return the settings of a search that it keeps, inside a session; empty: there is none.

    Raises:
        ConfigError: if its direction is not that of the recipe.
    """
    if not choice.is_search or examined[0].problems:
        return {}
    from runner.sweep.optuna import settings as of_search  # needs Optuna

    name, recipe = request.config_name, examined[0].recipe
    study = f"{recipe.name}-{plan.digest_of(name, request.given)}"
    return of_search.recorded(choice.nodes[plugins.SWEEPER], recipe, study)


# -- running -------------------------------------------------------------------------------


def _run(
    request: Request,
    choice: Choice,
    sweep: Sweep,
    examined: Sequence[Examined],
    server: Server,
    hydra: Hydra,
) -> int:
    before, numbers = _sessions(sweep), sweep.pending()
    total = len(sweep.description.jobs)
    done = total - len(numbers) if total else len(sweep.started())
    counted = f" ({total} jobs{f', {done} are finished' if done else ''})" if total else ""
    print(f"sweep: {sweep.path}{counted}", flush=True)
    with hydra_setup.session():
        levels = hydra_setup.log_levels(request.overrides)
    is_ours = choice.is_watched or choice.launcher == plan.SLURM
    with (
        stops_heard() if is_ours else job.stops_sent_on(sweep.path) as stops,
        contextlib.ExitStack() as stack,
    ):
        local = None
        if choice.is_watched:
            alone = choice.is_local and request.settings.jobs == 1
            common = _common(examined) if len(examined) > 1 else ()
            live = Live(sweep.path, total or None, done, alone=alone, common=common)
            stack.callback(live.close)
            forks = server() if choice.is_local else None
            local = job.Local(forks, live, request.settings.jobs)
        called = job.Task(
            folder=str(sweep.path),
            config_name=request.config_name,
            parent=os.getpid(),
            host=platform.node(),
            is_detached=choice.launcher == plan.SLURM,
            command=tuple(sys.orig_argv),
            numbers=numbers if choice.known else None,
            log_levels=tuple(levels.items()),
            local=local,
        )
        try:
            code = hydra(_line(request, choice, sweep), called)
        except job.JobFailed as error:  # the sweeper gave up
            print(error, file=sys.stderr, flush=True)
            code = FAILED
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:  # of the launcher or the sweeper
            code = failures.report(error)
        stack.close()
        if code == REFUSED and _sessions(sweep) == before:
            return code
        stopped = code in (STOPPED, INTERRUPTED) or bool(stops.received)
        ended = table.conclude(sweep, request.config_name, is_stopped=stopped)
        if stopped:
            return code if code in (STOPPED, INTERRUPTED) else STOPPED
        # A search that is refused after its first jobs has failed.
        return FAILED if {code, ended} & {FAILED, REFUSED} else max(code, ended)


def _sessions(sweep: Sweep) -> set[Path]:
    """Return the sessions of all jobs."""
    return set(sweep.path.glob("[0-9]*/sessions/*"))


def _line(request: Request, choice: Choice, sweep: Sweep) -> list[str]:
    """Return Hydra's command line."""
    _store_own()
    overrides = hydra_setup.without_levels(request.overrides)
    groups = (plugins.LAUNCHERS, plugins.SWEEPERS)
    given = [one for one in overrides if hydra_setup.key_of(one) not in groups]
    name = request.config_name
    line = ["--config-name", name, "--multirun"]
    # Hydra looks up the primary file before it reads hydra.searchpath.
    places = [one.removeprefix("file://") for one in hydra_setup.search_places(overrides)]
    line += [f"--config-dir={one}" for one in places if Path(one, f"{name}.yaml").is_file()][:1]
    launcher = plan.LOCAL if choice.is_local else choice.launcher
    sweeper = plan.KNOWN if choice.known else choice.sweeper
    chosen = [f"hydra/launcher={launcher}", f"hydra/sweeper={sweeper}"]
    with hydra_setup.session():
        own = [*hydra_setup.for_hydra(given), *hydra_setup.FIXED]
    where = [f"hydra.sweep.dir='{sweep.path}'", "hydra.sweep.subdir=."]
    if launcher == plan.SLURM:
        target = f"hydra.launcher._target_={plugins.MODULE}.SlurmLauncher"
        where += [target, f"hydra.job.name='{sweep.description.recipe['name']}'"]
    return [*line, *own, *chosen, *where]


def _store_own() -> None:
    """Make the launcher of this machine and the sweeper of known jobs known to Hydra."""
    store = ConfigStore.instance()
    here = {"_target_": f"{plugins.MODULE}.LocalLauncher"}
    store.store(group=plugins.LAUNCHERS, name=plan.LOCAL, node=here, provider="runner")
    known = {"_target_": f"{plugins.MODULE}.KnownJobs", "max_batch_size": None, "params": None}
    store.store(group=plugins.SWEEPERS, name=plan.KNOWN, node=known, provider="runner")


# -- listing -------------------------------------------------------------------------------


def listing(examined: Sequence[Examined]) -> list[str]:
    """Return a line for each job: its number, and the overrides that differ between jobs."""
    common = _common(examined)
    shared = [one for one in examined[0].overrides if one in common]
    lines = [f"{len(examined)} jobs; all have: {' '.join(shared) or 'nothing'}"]
    for number, found in enumerate(examined):
        own = [one for one in found.overrides if one not in common]
        lines.append(f"{number:04}  {' '.join(own)}".rstrip())
    return lines


def _common(examined: Sequence[Examined]) -> set[str]:
    """Return the overrides that all jobs have."""
    return set.intersection(*(set(one.overrides) for one in examined))


def recipe_lines(examined: Sequence[Examined]) -> Iterator[str]:
    """Yield the first job's recipe, and for each other job the keys whose values differ."""
    first = serialization.to_plain(examined[0].recipe)
    for number, found in enumerate(examined):
        here = serialization.to_plain(found.recipe)
        yield f"# {number:04}  {' '.join(found.overrides)}".rstrip()
        yield from (f"{key}: {value}" for key, _, value in serialization.differences(first, here))
