"""Public names of a package that are imported when they are first used (PEP 562).

The package's ``__init__.pyi`` is the table, in which type checkers look, too: each line is
``from package.module import name as name``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


@functools.cache
def public_names(package: str) -> Mapping[str, str]:
    """Return the module of each public name of a package, from its ``__init__.pyi``."""
    stub = Path(str(sys.modules[package].__file__)).with_suffix(".pyi")
    lines = ast.parse(stub.read_text(encoding="utf-8")).body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return MappingProxyType(
        {alias.name: str(line.module) for line in imports for alias in line.names}
    )


def attribute(package: str, name: str) -> object:
    """Return a public name of a package and keep it there; `AttributeError` if it has none such."""
    modules = public_names(package)
    if name == "__all__":
        return list(modules)
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(modules[name]), name)
    setattr(sys.modules[package], name, value)
    return value


def names(package: str) -> list[str]:
    """Return what `dir` shows of a package."""
    return sorted({*vars(sys.modules[package]), *public_names(package)})
