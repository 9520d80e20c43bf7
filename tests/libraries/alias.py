"""Put `accel` in the place of the package `accelerate`, before anything imports that.

`install()` answers each import of `accelerate` and `accelerate.x.y` with the module of `accel` of
the same path, itself and not a copy, and `importlib.metadata` with its version: the package need
not be installed, and where it is, none of it is imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

OTHER, OURS = "accelerate", "accel"
# Command lines start jobs, which `accel` does not.
COMMANDS, OUR_COMMANDS = f"{OTHER}.commands", "tests.libraries.commands"
# Some libraries believe in a package of this name only if its page is of the makers they know.
_METADATA = """\
Metadata-Version: 2.1
Name: accelerate
Version: {version}
Home-page: https://github.com/huggingface/accelerate
"""


def path_here(name: str) -> str:
    """Return the module that `accelerate`, or a module in it, stands for."""
    if name == COMMANDS or name.startswith(f"{COMMANDS}."):
        return OUR_COMMANDS + name.removeprefix(COMMANDS)
    return OURS + name.removeprefix(OTHER)


class _Loader(importlib.abc.Loader):
    """Hand out the module of accel: it is executed once, under its own name."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return accel's module; it keeps its own name and specification."""
        module = importlib.import_module(path_here(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own specification, which the import system has replaced."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


class _Finder(importlib.metadata.DistributionFinder):
    """Answer imports of `accelerate…`, and questions for the installed distribution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how a module is loaded; None for those of other packages."""
        if name.partition(".")[0] != OTHER:
            return None
        ours = importlib.util.find_spec(path_here(name))
        if ours is None:
            raise ModuleNotFoundError(
                f"No module named {name!r}: accel has no {path_here(name)}", name=name
            )
        is_package = ours.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=is_package)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Yield the distribution `accelerate` where all, or that one, are asked for."""
        if context is None or context.name in (None, OTHER):
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    """The distribution `accelerate`, as far as libraries read it: name and version."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of a metadata file; None of those that there are not."""
        version = importlib.import_module(OURS).__version__
        files = {
            "METADATA": _METADATA.format(version=version),
            "top_level.txt": f"{OTHER}\n",
        }
        return files.get(filename)

    def locate_file(self, path: object) -> importlib.metadata.SimplePath:
        """Return the path of a file of the package."""
        return Path(str(path))


def install() -> None:
    """Answer every later import of `accelerate` with `accel`.

    Raises:
        RuntimeError: `accelerate` has been imported already.
    """
    loaded = sys.modules.get(OTHER)
    if loaded is not None and loaded is not sys.modules.get(OURS):
        raise RuntimeError(
            f"{OTHER} is imported already, from {loaded.__file__}: libraries would keep parts of "
            "both packages. Install the alias before anything else is imported."
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
