"""Public names of a package that are imported when they are first used (PEP 562).

The package's ``__init__.pyi`` is the table, in which type checkers look, too: each line is
``from package.module import name as name``. Lines ``from package import module as module`` tell
type checkers of modules, which are imported at their first use, too, and are none of the names.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType


class Package(ModuleType):
    """A package whose names keep their values where a module in it is called alike.

    Python binds a module to its name in the package at the first import, as of `accel.utils.tqdm`.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in public_names(self.__name__)):
            super().__setattr__(name, value)


@functools.cache
def public_names(package: str) -> Mapping[str, str]:
    """Return the module of each public name of a package, from its ``__init__.pyi``."""
    stub = Path(str(sys.modules[package].__file__)).with_suffix(".pyi")
    lines = ast.parse(stub.read_text(encoding="utf-8")).body
    imports = [
        line for line in lines if isinstance(line, ast.ImportFrom) and line.module != package
    ]
    return MappingProxyType(
        {alias.name: str(line.module) for line in imports for alias in line.names}
    )


def attribute(package: str, name: str) -> object:
    """Return a public name or a public module of a package; `AttributeError` if it has none such.

    A name is kept in the package. Modules are imported at their first use, too: a script that says
    ``import accel`` and then ``accel.utils.set_seed(0)`` has imported no module of that package.
    """
    modules = public_names(package)
    if name == "__all__":
        return list(modules)
    if name not in modules and _is_module(package, name):
        return importlib.import_module(f"{package}.{name}")
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(modules[name]), name)
    setattr(sys.modules[package], name, value)
    return value


def _is_module(package: str, name: str) -> bool:
    is_package = hasattr(sys.modules[package], "__path__")
    return (
        is_package
        and not name.startswith("_")
        and importlib.util.find_spec(f"{package}.{name}") is not None
    )


def names(package: str) -> list[str]:
    """Return what `dir` shows of a package."""
    return sorted({*vars(sys.modules[package]), *public_names(package)})
