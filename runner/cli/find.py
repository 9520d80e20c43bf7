"""Command lines of ``runner lr-find`` and ``runner batch-size-find``: runs that are not kept."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accel.machine.errors import ConfigError
from accel.machine.imports import is_available
from runner.cli import arguments as command_line
from runner.cli import program
from runner.cli.arguments import CommandParser, Exit
from runner.exit_codes import DONE, FAILED
from runner.recipe import processes
from runner.recipe.composition import Examined
from runner.recipe.schema import Checkpoint, Tracker
from runner.runs import sessions
from runner.runs.json_files import Fields

ROWS, WIDTH = 25, 60  # of the curve in the terminal


def learning_rate(arguments: Sequence[str]) -> int:
    """Train with growing learning rates; print and draw the losses, and suggest a rate.

    Raises:
        ConfigError: if the recipe or an option is refused.
        Exit: if training fails, which has been reported.
    """
    parser = CommandParser("lr-find", "Train with growing learning rates, and suggest one.")
    add = parser.add_argument
    add("--min", type=float, default=1e-6, metavar="LR", help="of the first step (1e-6)")
    add("--max", type=float, default=1.0, metavar="LR", help="of the last step (1.0)")
    add("--steps", type=int, default=100, metavar="N", help="optimizer steps (100)")
    add("--output", type=Path, default=Path("lr_find.png"), metavar="FILE", help="the figure")
    found, examined = _parsed(parser, arguments)
    node = {"name": "lr_find", "min_lr": found.min, "max_lr": found.max, "num_steps": found.steps}
    print(f"{found.steps} steps with learning rates from {found.min:g} to {found.max:g} …")
    curve = _trained(examined, node, {"max_steps": found.steps})["lr_find"]
    print(*_bars(curve), _drawn(curve, found.output), sep="\n")
    rate = curve["suggestion"] and f"optimizer.lr={curve['suggestion']:.2g}"
    print(f"The loss falls fastest at {rate or 'none of these rates'}")
    return DONE


def _bars(curve: Fields) -> Iterator[str]:
    """Yield rows of the smoothed losses: the rate, the loss and a bar of it."""
    rates, losses = curve["rates"], curve["losses"]
    lowest, highest = min(losses), min(max(losses), 2 * losses[0])
    every = -(-len(losses) // ROWS)
    yield "learning rate     loss"
    for start in range(0, len(losses), every):
        filled = min(1.0, (losses[start] - lowest) / ((highest - lowest) or 1.0))
        marked = curve["suggestion"] in rates[start : start + every]
        bar = "█" * round(filled * WIDTH) + (" ◀ suggestion" if marked else "")
        yield f"{rates[start]:13.2e} {losses[start]:8.4g} {bar}".rstrip()


def _drawn(curve: Fields, output: Path) -> str:
    """Draw the losses over the rates, and return what to say of the figure."""
    if not is_available("matplotlib"):
        return f"{output} is not drawn: matplotlib is not installed (pip install matplotlib)."
    from matplotlib.figure import Figure

    axes = (figure := Figure(layout="constrained")).add_subplot()
    axes.set(xscale="log", xlabel="learning rate", ylabel="smoothed loss")
    axes.plot(curve["rates"], curve["losses"])
    axes.axvline(curve["suggestion"] or curve["rates"][-1], linestyle="--")
    axes.set_ylim(top=2 * curve["losses"][0])
    figure.savefig(output, dpi=150)
    return f"{output}: the curve"


def batch_size(arguments: Sequence[str]) -> int:
    """Train two steps with ever larger micro-batches; print the largest that fits in memory.

    Raises:
        ConfigError: if the recipe or an option is refused.
        Exit: if training fails for another reason, which has been reported.
    """
    from accel.machine.memory import OUT_OF_MEMORY
    from accel.utils import convert_file_size_to_int, get_max_memory

    parser = CommandParser("batch-size-find", "Find the largest micro-batch that fits in memory.")
    parser.add_argument("--max", type=int, default=4096, metavar="N", help="largest size (4096)")
    parser.add_argument("--memory", metavar="SIZE", help="of a process, e.g. 4GB (what is free)")
    found, examined = _parsed(parser, arguments)
    trainer, distributed = examined.recipe.trainer, examined.recipe.distributed
    dp_size = processes.dp_size(examined.recipe, processes.count(distributed))
    free = get_max_memory()["cpu"] // processes.local_count(distributed)
    given = found.memory and convert_file_size_to_int(found.memory)
    size, best, reason = 1, 0, ""
    while not reason and size <= found.max:
        sizes = {"micro_batch_size": size, "global_batch_size": size * dp_size, "max_steps": 2}
        changes = {**sizes, "accumulation": replace(trainer.accumulation, num_steps=None)}
        summary = _trained(examined, {"name": "peak_memory"}, changes, OUT_OF_MEMORY)
        peak, device = summary.get("memory", (0, ""))
        if not summary:
            reason = "out of memory"
        elif summary["samples"] < 2 * size * dp_size:
            reason = "more than the training data have"
        elif peak > (given or (free if device == "cpu" else peak)):
            reason = f"{peak / 1e9:.2f} GB: too much"
        print(f"micro-batch {size:5}: {reason or f'{peak / 1e9:.2f} GB'}", flush=True)
        best, size = best if reason else size, 2 * size
    if not best:
        return FAILED
    total = -(-trainer.global_batch_size // (best * dp_size)) * best * dp_size
    print(f"It fits: trainer.micro_batch_size={best} trainer.global_batch_size={total}")
    return DONE


# -- trials --------------------------------------------------------------------------------


def _parsed(parser: CommandParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Examined]:
    """Return the options of a command, and the recipe that its other arguments describe.

    Raises:
        ConfigError: if one of them is refused.
    """
    from runner.launch import nodes
    from runner.training import build, run_log

    found, rest = parser.parse_known_args(list(arguments))
    flags = command_line.parse(rest)
    rule = "it trains one new run, in processes that it starts on this machine"
    remedy = "Leave out -m, --cfg, --dry-run, resume=, several nodes and other launchers."
    refusal = ConfigError.of(parser.prog, rule, remedy)
    if flags.multirun or flags.cfg or flags.dry_run or processes.adopted() is not None:
        raise refusal
    overrides = program.last_of_each(command_line.searched(flags))
    examined, missing = program.checked(overrides, flags.config_name)
    if examined.recipe.resume or nodes.is_one_of_several(examined.recipe.distributed):
        raise refusal
    run_log.announce(examined.recipe.name)
    build.require([examined], missing)
    return found, examined


def _trained(one: Examined, node: Fields, trainer: Fields, may_say: Sequence[str] = ()) -> Fields:
    """Train a few steps of a recipe with a callback of ours, in processes of their own.

    Nothing is saved or tracked; a batch is evaluated at the end.

    Args:
        one: the recipe.
        node: of the callback.
        trainer: changes of the recipe's.
        may_say: what a failure may say that is no failure of the command.

    Returns:
        The summary of the run; empty after such a failure.

    Raises:
        Exit: if it fails.
    """
    from runner.launch import launcher, start_run

    recipe = one.recipe
    short: dict[str, Any] = {
        **{"epochs": None, "stop_after": None, "max_time": None, "sanity_steps": 0},
        **{"eval_every": trainer["max_steps"] + 1, "limit_eval_batches": 1},
        **{"log_every": 1, "stop_on_nan": False, "drop_last": False, **trainer},
    }
    with tempfile.TemporaryDirectory(prefix="runner-find-") as folder:
        run_dir, log = Path(folder, "run"), Path(folder, "log")
        changed = replace(
            recipe,
            run_dir=str(run_dir),
            scheduler=None,
            profile=None,
            callbacks={**(recipe.callbacks or {}), node["name"]: node},
            trainer=replace(recipe.trainer, **short),
            checkpoint=Checkpoint(
                every_epochs=None,
                at_end=False,
                keep_best=0,
                monitor=recipe.checkpoint.monitor,
                mode=recipe.checkpoint.mode,
            ),
            tracker=Tracker(log_with=[]),
            distributed=replace(recipe.distributed, max_restarts=0),
        )
        with _quiet(log):
            launch = partial(launcher.launch, fresh=True)
            code = start_run.start(replace(one, recipe=changed), train=launch)
        told = log.read_text(errors="replace")
        if code == DONE:
            return sessions.summary(run_dir)
    if any(text in told for text in may_say):
        return {}
    print(told, file=sys.stderr)
    raise Exit(code)


@contextlib.contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Write what this process and its children print in the context to a file."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with log.open("wb") as file:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            sys.stdout.flush()
            for number, copy in enumerate(kept, start=1):
                os.dup2(copy, number)
                os.close(copy)
