"""The command line: subcommands, training, the exit code. Free of torch until a job starts."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.commands.program import COMMANDS as OF_ACCEL
from accel.machine import env, parent_watch
from accel.machine.errors import ConfigError, Problem
from accel.machine.imports import load_attribute
from runner.cli import arguments as command_line
from runner.exit_codes import DONE, FAILED, INTERRUPTED
from runner.launch import failures
from runner.recipe import paths, trust
from runner.runs import numerics
from runner.training import run_log

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from runner.recipe.composition import Examined
    from runner.recipe.schema import Recipe

DISTRIBUTION = "accel-runner"
# Functions of the arguments behind a subcommand, which return the exit code.
SUBCOMMANDS = {
    "list": "runner.cli.look:list_runs",
    "show": "runner.cli.look:show_run",
    "compare": "runner.cli.look:compare_runs",
    "report": "runner.cli.look:report_runs",
    "new": "runner.cli.new:main",
    "factories": "runner.cli.factories:main",
    "data": "runner.cli.data:main",
    "again": "runner.cli.again:main",
    "submit": "runner.cli.submit:main",
    "lr-find": "runner.cli.find:learning_rate",
    "batch-size-find": "runner.cli.find:batch_size",
    "eval": "runner.cli.evaluate_predict:evaluate_runs",
    "predict": "runner.cli.evaluate_predict:predict",
    "generate": "runner.cli.generate:main",
    "export": "runner.cli.export:main",
}


@contextlib.contextmanager
def trusted(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Trust the packages of ``--import`` here and in workers; yield the other arguments."""
    imports, rest = command_line.take_imports(arguments)
    given = [name for name in (env.read(trust.VARIABLE) or "").split(",") if name]
    named = ",".join([*given, *imports]) or None
    with env.patched(**{trust.VARIABLE: named}), numerics.sleeping_when_idle():
        yield rest


def code_of(error: BaseException) -> int:
    """Say on standard error what ended a command, and return its exit code."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):  # of `runner list | head`
        # The interpreter flushes the buffer at its exit, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return error.code if isinstance(error, command_line.Exit) else failures.report(error)


def requested(arguments: Sequence[str]) -> Callable[[], int]:
    """Return what a command line asks for."""
    name = arguments[0] if arguments else ""
    if name in OF_ACCEL:
        raise ConfigError.of(f"runner {name}", "it is accel's", f"Write accel {name}.")
    if name in SUBCOMMANDS:
        return partial(load_attribute(SUBCOMMANDS[name]), arguments[1:])
    flags = command_line.parse(arguments)
    overrides = command_line.searched(flags)
    if flags.help:
        return _help
    if flags.version:
        return _version
    if flags.shell_completion and overrides[:1] and overrides[0].startswith("query="):
        return partial(_complete, overrides[0].partition("=")[2])
    if flags.shell_completion or flags.hydra_help or flags.info:
        return partial(_ask_hydra, overrides, flags)
    overrides = last_of_each(overrides)
    of_hydra = flags.cfg in ("hydra", "all")
    if flags.multirun and of_hydra:
        rule = "of a sweep the jobs are listed"
        raise ConfigError.of(f"--cfg {flags.cfg} with --multirun", rule, "Write --cfg job.")
    if flags.dry_run or (flags.cfg and flags.multirun):
        return partial(_list, overrides, flags)
    if of_hydra:
        return partial(_ask_hydra, overrides, flags)
    if flags.cfg:
        return partial(_show, overrides, flags)
    return partial(_train_all if flags.multirun else _train, overrides, flags.config_name)


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """Return the last override of each key, and say which others it overrides."""
    from runner.recipe import diagnose

    for line in diagnose.overridden(overrides):
        print(line, file=sys.stderr)
    return diagnose.unique(overrides)


def _complete(shell: str) -> int:
    """Print the completions of the line in COMP_LINE: on one line, or one per line for fish."""
    from runner.cli import completion

    found = completion.candidates(env.read("COMP_LINE") or "")
    print(("\n" if shell == "fish" else " ").join(found))
    return DONE


def _help() -> int:
    from runner.cli import help

    print(help.text())
    return DONE


def _version() -> int:
    try:
        print(f"runner {importlib.metadata.version(DISTRIBUTION)}")
    except importlib.metadata.PackageNotFoundError:
        print(f"runner, a checkout at {paths.conf_folder().parent}")
    return DONE


def _show(overrides: Sequence[str], flags: argparse.Namespace) -> int:
    """Print the composed recipe; with --resolve also the arguments at a factory's default."""
    from omegaconf import OmegaConf

    from runner.recipe import composition, factory, hydra_setup, keys, serialization

    with hydra_setup.session(overrides):
        examined = examine(overrides, flags.config_name)
    _require_names([examined], _import_packages_named(examined.recipe))
    recipe = composition.require(examined)
    if flags.resolve:
        ConfigError.raise_if([*trust.missing_packages(), *factory.check_factories(recipe)])
        recipe = factory.completed(recipe)
    shown = OmegaConf.create(serialization.to_plain(recipe))
    if flags.package is not None:
        content: Any = OmegaConf.to_container(shown)
        known = keys.known_keys(content)
        if flags.package not in known:
            value, rule = f"--package {flags.package}", "the recipe has no such node"
            raise ConfigError.of(value, rule, keys.suggestion(flags.package, known))
        shown = OmegaConf.select(shown, flags.package)
    print(OmegaConf.to_yaml(shown).rstrip() if OmegaConf.is_config(shown) else shown)
    return DONE


def _train(overrides: Sequence[str], config_name: str) -> int:
    """Train one job, which is checked before it starts."""
    from runner.launch import launcher, nodes, start_run
    from runner.recipe import processes
    from runner.training import build

    place = processes.adopted()
    if place is not None:
        parent_watch.die_alone_with(os.getppid())
        if place.rank > 0:
            return launcher.follow(place)
    examined, missing = checked(overrides, config_name)
    if nodes.is_member(examined.recipe.distributed):
        return start_run.join(examined.recipe)
    run_log.announce(examined.recipe.name)
    with launcher.warming(examined.recipe) as server:
        build.require([examined], missing)
        return start_run.start(examined, train=partial(launcher.launch, server=server))


def checked(
    overrides: Sequence[str], config_name: str, *, submits: bool = False
) -> tuple[Examined, list[Problem]]:
    """Compose one job, and raise what is wrong with it that can be found without torch.

    Args:
        overrides: of its recipe.
        config_name: the file that it starts from.
        submits: whether the command is `runner submit`, which alone reads the node `submit`.

    Returns:
        The job, and the problems of the user's packages.
    """
    from runner.recipe import hydra_setup
    from runner.sweep import plan

    if trust.trusted():  # packages of the user's import torch
        run_log.announce("runner")
    with hydra_setup.session(overrides):
        ConfigError.raise_if(plan.misplaced(overrides, submits=submits))
        examined = examine(overrides, config_name)
    missing = trust.missing_packages()
    _require_names([examined], missing)
    return examined, missing


def examine(overrides: Sequence[str], config_name: str) -> Examined:
    """Compose one job; the run that it resumes, if any, is then `recipe.resume`."""
    from runner.launch import nodes
    from runner.recipe import composition, hydra_setup, processes
    from runner.runs import directory, resumable

    new = [override for override in overrides if hydra_setup.key_of(override) != "resume"]
    requested = next((o for o in overrides if hydra_setup.key_of(o) == "resume"), "")
    value = requested.partition("=")[2].strip("'\"")
    if requested and value not in (resumable.AUTO, "null", ""):
        run_dir = directory.existing(value, "resume=")
        return _resumed(composition.resumed(directory.frozen(run_dir), new), str(run_dir))
    examined = composition.new_run(overrides, config_name)
    if examined.problems:
        return examined
    if examined.recipe.resume is None:
        return replace(examined, problems=processes.restarts_of_new_runs())
    if examined.recipe.resume != resumable.AUTO:
        value = f"resume={examined.recipe.resume!r} in a file"
        rule, remedy = "a file can set only resume: auto", "Name the run on the command line."
        return replace(examined, problems=[Problem(value, rule, remedy)])
    if nodes.is_member(examined.recipe.distributed):
        return examined  # the first node finds the run
    missing = _import_packages_named(examined.recipe)  # runs are compared with all arguments
    if missing:
        return replace(examined, problems=missing)
    found = resumable.newest(examined.recipe)
    if found is None:
        return replace(examined, recipe=replace(examined.recipe, resume=None))
    examined = replace(
        examined, overrides=tuple(new), origin=directory.fingerprint(found), auto=True
    )
    return _resumed(examined, str(found))


def _resumed(examined: Examined, run_dir: str) -> Examined:
    return replace(examined, recipe=replace(examined.recipe, resume=run_dir))


def _import_packages_named(recipe: Recipe) -> list[Problem]:
    """Import the user's packages where a recipe names factories that are not built in."""
    from runner.recipe import factory

    return trust.missing_packages() if factory.unregistered(recipe) else []


def _require_names(checked: Sequence[Examined], missing: Sequence[Problem]) -> None:
    """Raise the problems of all jobs that can be found without loading torch."""
    from runner.recipe import factory

    problems = dict.fromkeys(missing)
    for examined in checked:
        problems.update(dict.fromkeys(examined.problems))
        if examined.composed:
            problems.update(dict.fromkeys(factory.wrong_names(examined.recipe)))
    ConfigError.raise_if(list(problems))


def _train_all(overrides: Sequence[str], config_name: str) -> int:
    """Train the jobs of a sweep, each in processes of its own, where the launcher puts them."""
    from runner.launch import nodes
    from runner.recipe import processes
    from runner.sweep import command
    from runner.training import build

    if processes.adopted() is not None:
        rule = "a sweep starts the processes of each job itself"
        remedy = "Start it without torchrun, mpirun or srun."
        raise ConfigError.of("--multirun on processes of a launcher", rule, remedy)
    if trust.trusted():  # packages of the user's import torch
        run_log.announce("runner")
    missing = trust.missing_packages()
    request = command.Request.of(overrides, config_name)

    def require(examined: Sequence[Examined]) -> None:
        if any(nodes.is_one_of_several(one.recipe.distributed) for one in examined):
            rule = "the commands of several nodes train one run"
            remedy = "Leave distributed.rdzv_endpoint out, or start the runs one by one."
            raise ConfigError.of("distributed=multi_node with --multirun", rule, remedy)
        run_log.announce(examined[0].recipe.name if examined else "")
        build.require(examined, missing)
        build.check_steps(examined)

    return command.train(request, lambda found: _require_names(found, missing), require, _hydra)


def _list(overrides: Sequence[str], flags: argparse.Namespace) -> int:
    """Print the jobs of a sweep, or one recipe's check, and start nothing."""
    from runner.sweep import command
    from runner.training import build

    if not flags.multirun:
        one, missing = checked(overrides, flags.config_name)
        found, note = [one], ""
    else:
        missing = trust.missing_packages()
        request = command.Request.of(overrides, flags.config_name)
        found, note = command.examine(request, lambda found: _require_names(found, missing))
    if flags.cfg:
        print("\n".join([*([f"# {note}"] if note else ()), *command.recipe_lines(found)]))
        return DONE
    run_log.announce(found[0].recipe.name)
    build.require(found, missing)
    if flags.multirun:
        print("\n".join(filter(None, [*command.listing(found), note])))
    for note in build.rehearse(found):
        print(f"not looked at: {note}")
    print("The configuration is valid; nothing was started (--dry-run).")
    return DONE


def _ask_hydra(overrides: Sequence[str], flags: argparse.Namespace) -> int:
    """Print what Hydra says of itself, or of a recipe, of which it would call the callbacks."""
    from runner.recipe import composition, hydra_setup

    if not flags.shell_completion:
        with hydra_setup.session(overrides):
            ConfigError.raise_if(composition.new_run(overrides, flags.config_name).problems)
    return _hydra(command_line.for_hydra(flags, overrides), lambda config: None)


def _hydra(line: Sequence[str], task: Callable[[DictConfig], object]) -> int:
    """Run Hydra's own main, which calls `task` with each job; return the code it ends with."""
    import hydra

    from runner.recipe import diagnose, hydra_setup

    main = hydra.main(
        version_base=hydra_setup.VERSION_BASE,
        config_path=str(paths.conf_folder()),
        config_name=hydra_setup.PRIMARY,
    )(task)
    before, sys.argv = sys.argv, ["runner", *line]
    try:
        # With this variable Hydra raises an error instead of printing it and exiting.
        with env.patched(HYDRA_FULL_ERROR="1"):
            main()
    except (ConfigError, BrokenPipeError):  # of a sweeper of ours; of one who reads the output
        raise
    except diagnose.MISTAKES as error:
        with hydra_setup.session():
            problems = diagnose.translate(error, hydra_setup.PRIMARY)
        raise ConfigError(*problems) from error
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else DONE
    finally:
        sys.argv = before
    return DONE
