"""torchrun, with exit codes that are the script's: ``python -m accel.commands.agent FLAGS SCRIPT``.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from accel.machine import env

OF_SIGNAL = 128  # and its number: how a shell says that a signal has ended a command


def main(arguments: Sequence[str]) -> int:
    """Start a script's processes, and wait for their end.

    Args:
        arguments: torchrun's.

    Returns:
        0; the exit code of the process that failed first; or 128 + the number of the signal that
        ended it or this process.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        with env.patched(**{env.LAUNCHER: str(os.getpid())}):
            run.run(run.parse_args(list(arguments)))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else OF_SIGNAL - failure.exitcode
    except SignalException as error:
        return OF_SIGNAL + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
