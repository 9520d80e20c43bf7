"""Command lines of ``runner lr-find`` and ``runner batch-size-find``: runs that are not kept."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accel.machine.errors import ConfigError
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
GB = 1e9


def learning_rate(arguments: Sequence[str]) -> int:
    """Train with growing learning rates; print and draw the losses, and suggest a rate.

    Raises:
        ConfigError: if the recipe or an option is refused.
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
    code, summary, told = _trained(examined, node, found.steps)
    if code != DONE:
        print(told, file=sys.stderr)
        return code
    curve = summary["lr_find"]
    print("\n".join(_bars(curve)))
    print(_draw(curve, found.output))
    if curve["suggestion"] is None:
        print("No suggestion: the loss falls at none of these rates.")
    else:
        print(f"The loss falls fastest at optimizer.lr={curve['suggestion']:.2g}")
    return DONE


def _bars(curve: Fields) -> list[str]:
    """Return rows of the smoothed losses: the rate, the loss and a bar of it."""
    rates, losses = curve["rates"], curve["smoothed"]
    lowest, highest = min(losses), min(max(losses), 2 * losses[0])
    every = -(-len(losses) // ROWS)
    rows = ["learning rate     loss"]
    for start in range(0, len(losses), every):
        loss = losses[start]
        filled = min(1.0, (loss - lowest) / ((highest - lowest) or 1.0))
        marked = curve["suggestion"] in rates[start : start + every]
        bar = "█" * round(filled * WIDTH) + (" ◀ suggestion" if marked else "")
        rows.append(f"{rates[start]:13.2e} {loss:8.4g} {bar}".rstrip())
    return rows


def _draw(curve: Fields, output: Path) -> str:
    """Draw the losses over the rates, and return what to say of the figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"{output} is not drawn: matplotlib is not installed (pip install matplotlib)."
    axes = (figure := Figure(layout="constrained")).add_subplot()
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
    axes.plot(curve["rates"], curve["losses"], color="lightgrey", label="loss")
    axes.plot(curve["rates"], curve["smoothed"], label="smoothed")
    if curve["suggestion"] is not None:
        axes.axvline(curve["suggestion"], linestyle="--", label=f"{curve['suggestion']:.2g}")
    axes.set_ylim(top=2 * curve["smoothed"][0])
    axes.legend()
    figure.savefig(output, dpi=150)
    return f"{output}: the curve"


def batch_size(arguments: Sequence[str]) -> int:
    """Train two steps with ever larger micro-batches; print the largest that fits in memory.

    Raises:
        ConfigError: if the recipe or an option is refused.
    """
    from accel.machine.memory import OUT_OF_MEMORY
    from accel.utils import convert_file_size_to_int, get_max_memory

    parser = CommandParser("batch-size-find", "Find the largest micro-batch that fits in memory.")
    add = parser.add_argument
    add("--start", type=int, default=1, metavar="N", help="the first size, which is doubled (1)")
    add("--max", type=int, default=4096, metavar="N", help="the largest size (4096)")
    what = "of each process, e.g. 4GB (default: the accelerator's; on the CPU, what is free)"
    add("--memory", metavar="SIZE", help=what)
    found, examined = _parsed(parser, arguments)
    if not 1 <= found.start <= found.max:
        rule = "the first size is at least 1, and at most --max"
        raise ConfigError.of(f"--start {found.start} --max {found.max}", rule, "Give --start 1.")
    trainer, distributed = examined.recipe.trainer, examined.recipe.distributed
    dp_size = processes.dp_size(examined.recipe, processes.count(distributed))
    given = convert_file_size_to_int(found.memory) if found.memory else math.inf
    free = get_max_memory()["cpu"] / processes.local_count(distributed)
    accumulation = replace(trainer.accumulation, num_steps=None)
    size, best, before = found.start, 0, 0
    print("micro-batch   memory of a process")
    while size <= found.max:
        sizes: dict[str, Any] = {"micro_batch_size": size, "global_batch_size": size * dp_size}
        sizes["accumulation"] = accumulation
        code, summary, told = _trained(examined, {"name": "peak_memory"}, 2, **sizes)
        if code != DONE and not any(text in told for text in OUT_OF_MEMORY):
            print(told, file=sys.stderr)
            return code
        if code != DONE:
            print(f"{size:11}   out of memory")
            break
        peak, device = summary["memory"]
        limit = min(given, free) if device == "cpu" else given
        if summary["samples"] < 2 * size * dp_size:
            print(f"{size:11}   more than the training data have")
            break
        print(f"{size:11}   {peak / GB:.2f} GB{'' if peak <= limit else ': too much'}", flush=True)
        if peak > limit:
            break
        expected = 3 * peak - 2 * before if best else 0  # it grows with the size
        best, size, before = size, 2 * size, peak
        if expected > limit:
            print(f"{size:11}   {expected / GB:.2f} GB expected: too much")
            break
    if not best:
        print(f"No size from {found.start} on fits.", file=sys.stderr)
        return FAILED
    step = best * dp_size
    total = -(-trainer.global_batch_size // step) * step
    print(f"The largest that fits: trainer.micro_batch_size={best}", end=" ")
    print(f"trainer.global_batch_size={total}")
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
    remedy = "Leave out -m, --cfg, resume=, several nodes and other launchers."
    refusal = ConfigError.of(parser.prog, rule, remedy)
    if flags.multirun or flags.cfg or processes.adopted() is not None:
        raise refusal
    examined, missing = program.checked(
        program.last_of_each(command_line.searched(flags)), flags.config_name
    )
    run_log.announce(examined.recipe.name)
    build.require([examined], missing)
    recipe = examined.recipe
    if recipe.resume is not None or nodes.is_one_of_several(recipe.distributed):
        raise refusal
    if flags.dry_run:
        print("The configuration is valid; nothing was started (--dry-run).")
        raise Exit(DONE)
    return found, examined


def _trained(
    examined: Examined, callback: dict[str, Any], num_steps: int, **trainer: Any
) -> tuple[int, Fields, str]:
    """Train a few steps of a recipe with a callback of ours, in processes of their own.

    Nothing is saved or tracked; a batch is evaluated at the end. The run lies where the recipe
    says `run_dir`, else nowhere afterwards.

    Returns:
        The exit code, the summary of the run, and what it has printed.
    """
    from runner.launch import launcher, start_run

    recipe = examined.recipe
    short: dict[str, Any] = {
        **{"epochs": None, "max_steps": num_steps, "stop_after": None, "max_time": None},
        **{"eval_every": num_steps + 1, "limit_eval_batches": 1, "sanity_steps": 0},
        **{"log_every": 1, "stop_on_nan": False, "drop_last": False, **trainer},
    }
    changed = replace(
        recipe,
        scheduler=None,
        profile=None,
        callbacks={**(recipe.callbacks or {}), callback["name"]: callback},
        trainer=replace(recipe.trainer, **short),
        checkpoint=Checkpoint(every_epochs=None, at_end=False, keep_best=0),
        tracker=Tracker(log_with=[]),
        distributed=replace(recipe.distributed, max_restarts=0),
    )
    train = partial(launcher.launch, fresh=True)
    with tempfile.TemporaryDirectory(prefix="runner-find-") as folder:
        run_dir, log = recipe.run_dir or str(Path(folder, "run")), Path(folder, "log")
        changed = replace(changed, run_dir=run_dir)
        with _quiet(log):
            code = start_run.start(replace(examined, recipe=changed), train=train)
        return code, sessions.summary(Path(run_dir)), log.read_text(errors="replace")


@contextlib.contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Write what this process and its children print in the context to a file."""
    with log.open("wb") as file:
        sys.stdout.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            for number, copy in enumerate(kept, start=1):
                os.dup2(copy, number)
                os.close(copy)
