"""The command as a program of its own: nothing but it runs in this process."""

from __future__ import annotations

import os
import sys

from runner.recipe import paths


def main() -> int:
    """Run the process's command line and return its exit code.

    Workers that are forked return through here, too: a caller that has something to clean up
    afterwards calls `runner.cli.main`, which forks none.
    """
    paths.move_project_last()
    open_missing_streams()
    from accel.machine.errors import ConfigError
    from runner import cli, collector

    collector.collect_rarely()
    try:
        from runner.launch import warm_workers
    except ConfigError:  # a strategy of another package cannot be loaded
        return cli.main()  # it tells
    warm_workers.allow()
    try:
        return cli.main()
    except warm_workers.Began as began:
        order = began.order
    return warm_workers.be(order)


def open_missing_streams() -> None:
    """Open /dev/null in place of standard streams that are closed, as after ``>&-``.

    Else the next file that is opened, a checkpoint perhaps, would get what is printed.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR)
            if file != number:
                os.dup2(file, number)
                os.close(file)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
