"""The command `runner`. Imports nothing of `accel` before `sys.path` is final."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runner.exit_codes import REFUSED
from runner.recipe import paths


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line in this process and return its exit code (`runner.exit_codes`).

    Args:
        argv: arguments without the program's name; None: those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    paths.move_project_last()
    from accel.machine.errors import ConfigError

    try:
        from runner.cli import program
    except ConfigError as error:  # a strategy of another package cannot be loaded
        print(error, file=sys.stderr)
        return REFUSED
    try:
        with program.trusted(arguments) as rest:
            code = program.requested(rest)()
        print(end="", flush=True)  # here, where a closed pipe is handled
    except BaseException as error:  # with the user's SystemExit(0) a run would look complete
        return program.code_of(error)
    return code
