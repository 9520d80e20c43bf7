"""The shipped `conf/`, the `conf/` of the project, and the module search path.

A project may have folders called `accel` or `conf` of its own. So the working directory is moved to
the end of `sys.path` before anything of `accel` is imported (not by this module, either), and the
shipped `conf/` is found from this file.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PRIMARY = "config.yaml"
TABLE = "tool.runner"  # a table that is not closed, too, so that it is refused

# Places that `hydra.searchpath` names on the command line, for the session under way.
given_conf_folders: tuple[str, ...] = ()

FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk or a quota


def move_project_last() -> None:
    """Move the working directory and the project's folder to the end of `sys.path`."""
    project = [os.path.realpath(folder) for folder in project_folders()]
    kept = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) not in project]
    sys.path[:] = [*kept, *project]


def conf_folder() -> Path:
    """Return the folder of the shipped recipes: in the installed package, or beside a checkout's.

    Raises:
        FileNotFoundError: if the installation lacks it.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / PRIMARY).is_file():
            return folder
    raise FileNotFoundError(
        f"There is no {PRIMARY} in {package / 'conf'} nor in {package.parent / 'conf'}: the "
        "installation is incomplete. Install the package again."
    )


def files_below(folder: str | os.PathLike[str], suffix: str = "") -> Iterator[Path]:
    """Yield the files of a folder, then those below it, in the order of names, through links."""
    for here, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        yield from (Path(here, name) for name in sorted(names) if name.endswith(suffix))


def default_files() -> dict[str, str]:
    """Return the file of each group that the shipped config.yaml chooses."""
    text = (conf_folder() / PRIMARY).read_text(encoding="utf-8")
    return dict(re.findall(r'^  - (\w+): "?(\w+)"?', text, re.M))


def project_file() -> Path | None:
    """Return the nearest pyproject.toml, here or in a folder above, with a [tool.runner] table."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file() and TABLE in _text(path):
            return path
    return None


def _text(path: Path) -> str:
    """Return the text of a file; undecodable bytes (UTF-16, which TOML is not) are replaced."""
    return path.read_text(encoding="utf-8", errors="replace").replace("\0", "")


def project_folders() -> list[str]:
    """Return the working directory, and the project's folder where that differs."""
    found = project_file()
    return list(dict.fromkeys([os.getcwd(), *([str(found.parent)] if found else [])]))


def project_conf_folders() -> list[Path]:
    """Return the `conf` folders of the project, leaving out the shipped one."""
    shipped = conf_folder().resolve()
    folders = [Path(folder, "conf").resolve() for folder in project_folders()]
    return [folder for folder in folders if folder.is_dir() and folder != shipped]


def failure(error: OSError) -> str:
    """Return the reason of a failed write for a message: a full disk is named."""
    full = error.errno in FULL
    return f"the disk is full: {error}" if full else str(error)
