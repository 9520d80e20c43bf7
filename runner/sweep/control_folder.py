"""The folder of one command in a sweep directory, `.command-<id>/`, by which its jobs find it.

It holds the process ids of the jobs, and whether they are to stop. Its lock tells whether the
command lives: the next one removes what a killed one has left. Free of torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accel.machine.errors import ConfigError
from runner.recipe import paths
from runner.run_dir import lock

NAME, UNFINISHED, LOCK = ".command-", ".new-command-", "lock"


@contextlib.contextmanager
def made(sweep_dir: Path) -> Iterator[Path]:
    """Make the folder of a command; it is removed at the end.

    Raises:
        ConfigError: if it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            _remove_dead(sweep_dir)
            new = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=sweep_dir))
            try:
                stack.enter_context(lock.waited_for(new / LOCK))
            except OSError as error:
                if error.errno not in lock.NOT_OFFERED:
                    raise
                (new / LOCK).unlink(missing_ok=True)  # nobody can tell that it is dead
            control = new.with_name(NAME + new.name.removeprefix(UNFINISHED))
            os.rename(new, control)
        except OSError as error:
            rule = (
                f"the jobs of a sweep are run from there, and that failed ({paths.failure(error)})"
            )
            remedy = "Make room, or the folder writable, and give the command again."
            raise ConfigError.of(str(sweep_dir), rule, remedy) from error
        try:
            yield control
        finally:
            # A launcher's process may be writing its last file there.
            shutil.rmtree(control, ignore_errors=True)


def others(sweep_dir: Path, own: Path | None = None) -> list[Path]:
    """Return the folders of commands that live, or may live, but for one's own."""
    return [one for one in sweep_dir.glob(f"{NAME}*") if one != own and not _is_dead(one)]


def _remove_dead(sweep_dir: Path) -> None:
    for path in sweep_dir.glob(f"{NAME}*"):
        if _is_dead(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_dead(control: Path) -> bool:
    """Return whether a command is gone; it has its lock as long as its folder has that name."""
    file = control / LOCK
    try:
        return file.exists() and not lock.is_held(file)
    except OSError:  # of another user
        return False
