"""Command line of ``runner new``: a project that trains at once, a copy of examples/myproject."""

from __future__ import annotations

import importlib.util
import keyword
from collections.abc import Sequence
from pathlib import Path

from accel.machine.errors import ConfigError
from runner.cli.arguments import CommandParser
from runner.exit_codes import DONE
from runner.recipe import paths

EXAMPLE = "myproject"
TEXTS = (".py", ".toml", ".yaml", ".md")


def main(arguments: Sequence[str]) -> int:
    """Write a project to a folder, and print the commands that go on with it.

    Raises:
        ConfigError: if the folder holds anything, or its name is not that of a new package.
    """
    parser = CommandParser("new", "Make a project: a model, data, a recipe and a test.")
    parser.add_argument("folder", metavar="DIR", type=Path, help="the package is called as it is")
    folder: Path = parser.parse_args(list(arguments)).folder
    name = folder.absolute().name.replace("-", "_")
    if not name.isidentifier() or keyword.iskeyword(name) or _is_taken(name):
        rule = f"the project's package would be called {name!r}, which Python has or does not allow"
        raise ConfigError.of(f"new {folder}", rule, "Choose another name, such as my_project.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError.of(f"new {folder}", "it is there, and not empty", "Name a new folder.")
    example = paths.conf_folder().parent / "examples" / EXAMPLE
    for path in paths.files_below(example):
        inside = path.relative_to(example)
        if inside.suffix not in TEXTS or inside.parts[0] == "runs":  # it may have been tried out
            continue
        place = folder / inside.as_posix().replace(EXAMPLE, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(path.read_text(encoding="utf-8").replace(EXAMPLE, name), encoding="utf-8")
    print(f"{folder}: {name}/ has a model and data, conf/ the recipe. Train it:")
    print(f"  cd {folder}\n  runner experiment={name}")
    return DONE


def _is_taken(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None
