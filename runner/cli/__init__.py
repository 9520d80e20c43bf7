"""The command `runner`. Imports nothing of `accel` before the module search path is settled.

Exit codes: 0 done; 1 failed; 2 the configuration was refused; 75 stopped by SIGTERM or SIGUSR1 with
the state saved (`resume=` goes on); 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runner.config import paths
from runner.exit_codes import REFUSED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: arguments without the program's name; None: those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    paths.settle()
    from accel.errors import ConfigError

    try:
        from runner.cli import dispatch
    except ConfigError as error:  # a strategy of another package cannot be loaded
        print(error, file=sys.stderr)
        return REFUSED
    return dispatch.run(arguments)
