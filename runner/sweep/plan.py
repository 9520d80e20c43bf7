"""The plan of a sweep: its settings, and the jobs that are known before it begins. Free of torch.

The keys ``sweep.*`` of a command line say how a sweep is run, and are no part of a job's recipe:

| key | meaning |
|---|---|
| ``sweep.dir=DIR`` | the directory of the sweep itself |
| ``sweep.jobs=N`` or ``auto`` | jobs at once on this machine; auto: as GPUs or CPU cores allow |
| ``sweep.list=FILE`` or ``[[a=1,b=2],[a=3]]`` | the overrides of each job, as YAML |
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import OmegaConf
from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

from accel.machine.errors import ConfigError, Problem, Problems, nearest
from accel.machine.imports import require
from runner.recipe import composition, diagnose, hydra_setup, keys, machines, plugins, trust
from runner.runs import json_files

if TYPE_CHECKING:
    from runner.recipe.composition import Examined

PREFIX = "sweep"
AUTO: Literal["auto"] = "auto"
Jobs = int | Literal["auto"]
REMEDIES = {
    "dir": "Give sweep.dir=<a folder>.",
    "jobs": "Give sweep.jobs=auto, or how many jobs run at once.",
    "list": "Give sweep.list=jobs.yaml, or sweep.list=[[a=1,b=2],[a=3]].",
}


@dataclass(frozen=True)
class Settings:
    """How a sweep is run.

    Args:
        dir: the directory of the sweep; None: ``<output_dir>/<name>/sweep-<time>-<digest>``.
        jobs: jobs at once on this machine; "auto": as many as its GPUs or CPU cores allow.
        list: the overrides of each job; None: the combinations of the swept values.
    """

    dir: str | None = None
    jobs: Jobs = 1
    list: tuple[tuple[str, ...], ...] | None = None


def is_setting(override: str) -> bool:
    """Return whether an override is of a key ``sweep.*``."""
    return re.match(rf"[+~]*{PREFIX}([.=]|$)", override) is not None


def take(overrides: Sequence[str]) -> tuple[Settings, list[str]]:
    """Return the settings of a sweep, and the other overrides.

    Raises:
        ConfigError: naming every key that is unknown and every value that is not allowed.
    """
    problems = Problems()
    values: dict[str, str] = {}
    for override in filter(is_setting, overrides):
        key, _, value = override.partition("=")
        name = key.removeprefix(f"{PREFIX}.")
        values[name] = value.strip("'\" ")
        if name not in REMEDIES:
            known = [f"{PREFIX}.{name}" for name in REMEDIES]
            rule = f"the keys of a sweep are {', '.join(known)}"
            problems.add(override, rule, nearest(key, known))
        elif not values[name]:
            problems.add(override, "it has a value", REMEDIES[name])
    problems.raise_if()
    jobs = values.get("jobs", "1")
    if jobs != AUTO and not (jobs.isdecimal() and int(jobs) >= 1):
        problems.add(f"sweep.jobs={jobs}", "it is auto or at least 1", REMEDIES["jobs"])
    listed = _listed(values["list"], problems) if "list" in values else None
    problems.raise_if()
    rest = [override for override in overrides if not is_setting(override)]
    return Settings(values.get("dir"), AUTO if jobs == AUTO else int(jobs), listed), rest


def _listed(value: str, problems: Problems) -> tuple[tuple[str, ...], ...]:
    """Return the overrides of each job of ``sweep.list``, which is a file or the list itself."""
    shown = f"sweep.list={value}"
    try:
        is_file = not value.startswith("[")
        jobs = safe_load(Path(value).expanduser().read_text("utf-8") if is_file else value) or []
        for job in jobs if isinstance(jobs, list) else [jobs]:
            if not isinstance(job, list) or not all(isinstance(one, str) for one in job):
                raise ValueError(f"{job!r} is no list of overrides")
    except (OSError, ValueError, YAMLError) as error:
        rule = f"it is a list of jobs, or a file of one: {' '.join(str(error).split())}"
        problems.add(shown, rule, REMEDIES["list"])
        return ()
    if not jobs:
        rule, remedy = "it has no jobs", "Write a line for each, as - [optimizer.lr=0.1, seed=1]."
        problems.add(shown, rule, remedy)
    for one in dict.fromkeys(one for job in jobs for one in job if is_setting(one)):
        problems.add(f"{one} in {shown}", "it holds for a sweep", "Give it beside sweep.list.")
    return tuple(map(tuple, jobs))


# -- the command ---------------------------------------------------------------------------


def is_scheduling(override: str) -> bool:
    """Return whether an override only says where, how many at once, or how loud jobs run."""
    if hydra_setup.is_of_logging(override):
        return True
    key = hydra_setup.key_of(override).replace("/", ".")
    if is_setting(override):
        return key != "sweep.list"
    return key in plugins.SCHEDULING or f"{key}.".startswith(f"{plugins.LAUNCHER}.")


def digest_of(config_name: str, overrides: Sequence[str]) -> str:
    """Return the digest of a command: the same for every start of the same sweep."""
    kept = [override for override in overrides if not is_scheduling(override)]
    return json_files.digest([config_name, kept])[:8]


def alone(overrides: Sequence[str], config_name: str) -> str:
    """Return the command that trains one job alone."""
    flags = [] if config_name == hydra_setup.PRIMARY else ["--config-name", config_name]
    return shlex.join(["python", "-m", "runner", *trust.flags(), *flags, *overrides])


# -- launcher and sweeper ------------------------------------------------------------------

BASIC, LOCAL, KNOWN = "basic", "local", "known"  # basic stands for our own, on this machine
SLURM = "submitit_slurm"
KINDS = ("launcher", "sweeper")
HYDRA_NODES = tuple(f"hydra.{kind}" for kind in KINDS)


@dataclass(frozen=True)
class Choice:
    """The launcher and the sweeper of a command.

    Args:
        launcher: `hydra/launcher`.
        sweeper: `hydra/sweeper`.
        nodes: by key, `hydra.launcher` and `hydra.sweeper` as plain containers, with their
            interpolations.
    """

    launcher: str
    sweeper: str
    nodes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether the jobs are the combinations of listed values, known in advance."""
        return self.sweeper == BASIC

    @property
    def is_search(self) -> bool:
        """Whether the sweeper is one of the runner's own that search with Optuna."""
        return self.sweeper in plugins.OWN

    @property
    def is_local(self) -> bool:
        """Whether jobs run in forks of this command's own server."""
        return self.launcher in (BASIC, LOCAL)

    @property
    def is_watched(self) -> bool:
        """Whether this command itself starts the jobs and sees their ends, wherever they run."""
        return self.is_local or self.launcher == machines.RAY


def _choice(overrides: Sequence[str], config_name: str) -> Choice:
    """Return the launcher and the sweeper, as files of groups and Hydra's own overrides set them.

    Files that cannot be composed are left out: they are reported when the jobs are composed.

    Raises:
        Exception: Hydra's and OmegaConf's own; `diagnose` translates them.
    """
    groups = set(hydra_setup.groups())
    of_hydra = [one for one in overrides if is_of_hydra(one)]
    chosen = [one for one in hydra_setup.not_swept(overrides) if hydra_setup.key_of(one) in groups]
    try:
        found = hydra_setup.composed_with_hydra([*chosen, *of_hydra], config_name)
    except diagnose.MISTAKES:
        found = hydra_setup.composed_with_hydra(of_hydra, config_name)
    node: Any = OmegaConf.to_container(found.hydra, resolve=False)
    names = node["runtime"]["choices"]
    launcher, sweeper = (names.get(f"hydra/{kind}") or BASIC for kind in KINDS)
    return Choice(launcher, sweeper, {f"hydra.{kind}": node[kind] for kind in KINDS})


def is_of_hydra(override: str) -> bool:
    """Return whether an override is of Hydra's own configuration."""
    return hydra_setup.key_of(override).startswith(("hydra.", "hydra/"))


def read(overrides: Sequence[str], config_name: str) -> Choice:
    """Return the launcher and the sweeper of a command line, as they are set.

    Raises:
        ConfigError: if one of their keys is wrong.
    """
    try:
        return _choice(overrides, config_name)
    except diagnose.MISTAKES as error:
        wrong = list(_wrong_keys(overrides))
        raise ConfigError(*(wrong or diagnose.translate(error, config_name))) from error


def _wrong_keys(overrides: Sequence[str]) -> Iterator[Problem]:
    """Yield the problem of each key of a launcher or a sweeper that is unknown or mistyped."""
    files = [one for one in overrides if hydra_setup.key_of(one).startswith("hydra/")]
    node = hydra_setup.composed_with_hydra(files, hydra_setup.PRIMARY)
    OmegaConf.set_readonly(node.hydra, False)
    for one in overrides:
        head, kind, name = [*hydra_setup.key_of(one).split("."), "", ""][:3]
        if head != "hydra" or kind not in KINDS:
            continue
        known = [key for key in map(str, node.hydra[kind]) if not key.startswith("_")]
        if name not in known:
            yield Problem(one, f"the {kind} has no such key", nearest(name, known))
            continue
        (parsed,) = hydra_setup.parse([one])
        problem = diagnose.set_value(node, parsed.key_or_group, parsed.value(), one)
        yield from [] if problem is None else [problem]


def choose(overrides: Sequence[str], config_name: str, chosen: Settings) -> Choice:
    """Return the launcher and the sweeper of a command, inside a Hydra session.

    Raises:
        ConfigError: if they cannot be used, or the sweep resumes a run.
    """
    problems = Problems(_not_of_sweeps(overrides))
    problems.raise_if()
    ConfigError.raise_if(diagnose.unreadable(overrides))
    fixed, rule = hydra_setup.not_swept(overrides), "a sweep has one configuration of Hydra's own"
    swept = [one for one in overrides if one not in fixed]
    of_hydra = [one for one in swept if is_of_hydra(one)]
    ConfigError.raise_if([Problem(one, rule, "Give one value.") for one in of_hydra])
    ConfigError.raise_if(_not_installed(overrides))
    found = read(overrides, config_name)
    if found.launcher == machines.RAY:
        require("ray", f"{plugins.LAUNCHERS}={machines.RAY}", extra="ray")
        plugins.RayConf(**found.nodes[plugins.LAUNCHER])  # checks the values
    if chosen.jobs != 1 and not found.is_local:
        problems.add(
            f"sweep.jobs={chosen.jobs} with hydra/launcher={found.launcher}",
            "that launcher decides how many jobs run at once",
            f"Leave one of them out; see hydra.launcher.* of {found.launcher}.",
        )
    if chosen.list is not None and not found.known:
        problems.add(
            f"sweep.list with hydra/sweeper={found.sweeper}",
            "that sweeper chooses the jobs",
            "Leave one of them out.",
        )
    problems.raise_if()
    return found


def require_place(choice: Choice) -> None:
    """Raise a ConfigError if the jobs of a sweep are for a cluster that is not there."""
    if choice.launcher != machines.RAY:
        return
    from runner.launch import ray

    address = choice.nodes[plugins.LAUNCHER]["address"]
    ray.require_cluster(address, f"{plugins.LAUNCHER}.address")


def require_cluster(choice: Choice) -> None:
    """Raise a ConfigError if the launcher hands jobs to a Slurm that is not there."""
    if choice.launcher == SLURM:
        from runner.launch import slurm

        slurm.require_slurm(f"hydra/launcher={SLURM}")


def _not_of_sweeps(overrides: Sequence[str]) -> list[Problem]:
    keys = {hydra_setup.key_of(override) for override in overrides}
    found = _of_submit(overrides, "Give hydra/launcher=submitit_slurm and hydra.launcher.*")
    if "resume" in keys:
        found.append(_no_resume("resume with --multirun"))
    if "run_dir" in keys:
        rule = "each job has a directory of its own"
        found.append(Problem("run_dir with --multirun", rule, "Give sweep.dir=DIR."))
    return found


def _no_resume(value: str) -> Problem:
    rule = "a sweep starts new runs, and the same command again goes on with them"
    return Problem(value, rule, "Leave it out. Resume each run by itself.")


# -- jobs ----------------------------------------------------------------------------------


def lists(overrides: Sequence[str], choice: Choice, chosen: Settings) -> list[list[str]]:
    """Return the overrides of each job that is known, inside a Hydra session.

    They have none of the launcher's keys: the same sweep may go on under another launcher. Of a
    sweeper that chooses its samples: jobs to check, one for each value that is listed.

    Raises:
        ConfigError: if a value is a range without steps or values, or would switch a group off.
    """
    if choice.is_search:
        require("optuna", f"{plugins.SWEEPERS}={choice.sweeper}", extra="optuna")
        from runner.sweep.optuna import settings as of_search

        return of_search.probes(choice.nodes[plugins.SWEEPER], overrides, choice.sweeper)
    overrides = [override for override in overrides if not is_scheduling(override)]
    if not choice.known:
        return hydra_setup.probes(overrides)
    if chosen.list is None:
        return hydra_setup.expand(overrides)
    unreadable = [found for item in chosen.list for found in diagnose.unreadable(item)]
    ConfigError.raise_if(list(dict.fromkeys(unreadable)))
    return [
        job
        for item in chosen.list
        for job in hydra_setup.expand(diagnose.unique([*overrides, *item]))
    ]


def examine(jobs: Sequence[Sequence[str]], config_name: str) -> list[Examined]:
    """Compose and check jobs, inside a Hydra session.

    Raises:
        ConfigError: if a file lets a job resume a run, or chooses its directory.
    """
    found = [composition.new_run(job, config_name, number) for number, job in enumerate(jobs)]
    ConfigError.raise_if(_resuming(found))
    return found


def require_one_plan(
    choice: Choice, jobs: Sequence[Sequence[str]], overrides: Sequence[str], config_name: str
) -> None:
    """Raise a ConfigError if swept files choose or set the launcher or the sweeper themselves.

    A sweep has one of each. `jobs` are those of a command with these `overrides`. Call it inside a
    Hydra session.
    """
    groups, common = set(hydra_setup.groups()), set.intersection(*map(set, jobs))
    others = dict.fromkeys(one for job in jobs for one in job if one not in common)
    swept = [one for one in others if hydra_setup.key_of(one) in groups]
    if not swept:
        return
    fixed, problems = hydra_setup.not_swept(overrides), Problems()
    try:
        for one in swept:
            there = _choice(diagnose.unique([*fixed, one]), config_name)
            names = {kind: getattr(there, kind) for kind in KINDS}
            own = [f"hydra/{k}={name}" for k, name in names.items() if name != getattr(choice, k)]
            own += [f"{key}.*" for key, node in there.nodes.items() if node != choice.nodes[key]]
            if own:
                rule = (
                    "it sets Hydra's launcher or sweeper, and a sweep has one for all of its jobs"
                )
                remedy = f"Give {' and '.join(own)} on the command line, or sweep {one} alone."
                problems.add(one, rule, remedy)
    except diagnose.MISTAKES:  # reported when the jobs are composed
        return
    problems.raise_if()


def _resuming(jobs: Sequence[Examined]) -> list[Problem]:
    if any(job.recipe is not None and job.recipe.resume is not None for job in jobs):
        return [_no_resume("resume: in a file, with --multirun")]
    if any(job.recipe is not None and job.recipe.run_dir is not None for job in jobs):
        rule = "each job has a directory of its own"
        return [Problem("run_dir: in a file, with --multirun", rule, "Leave it out.")]
    return []


def misplaced(overrides: Sequence[str], *, submits: bool = False) -> list[Problem]:
    """Return the problems of overrides that only a sweep, or `runner submit`, has a use for."""
    of_submit = [] if submits else _of_submit(overrides, "Write runner submit …, or leave it out.")
    return of_submit + [
        Problem(override, "it says how a sweep runs", "Add -m, or leave it out.")
        for override in overrides
        if is_setting(override)
        or hydra_setup.key_of(override).replace("/", ".").startswith(HYDRA_NODES)
    ]


def _of_submit(overrides: Sequence[str], remedy: str) -> list[Problem]:
    rule = "submit.* is what `runner submit` asks Slurm for"
    known = {key for key in keys.typed_keys() if key.startswith("submit.")}
    choices = {f"submit={name}" for name in diagnose.options_of("submit")}
    return [
        Problem(one, rule, remedy)
        for one in overrides
        if one in choices or hydra_setup.key_of(one) in known
    ]


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
        rule = f"there is no such {kind} here, but {', '.join(sorted(known))}"
        problems.append(Problem(override, rule, nearest(name, known)))
    return [*problems, *hydra_setup.hydra_problems(overrides)]
