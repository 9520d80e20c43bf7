"""Which code a recipe may name: one allow-list, and the user's packages.

A recipe that names ``_target_`` is code. Only packages that the product itself brings in, and those
that the person at the keyboard trusts, are ever imported for it. A package is trusted, and imported
so that its ``@register`` decorators run, by ``[tool.runner] imports = ["mypkg"]`` in the project's
pyproject.toml, by ``--import mypkg``, or by the environment variable RUNNER_IMPORTS; never by a
recipe. Free of torch.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import tomllib
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from accel.machine import env
from accel.machine.errors import ConfigError, Problem, Problems, closest, did_you_mean
from runner.recipe import paths

VARIABLE = "RUNNER_IMPORTS"
ALLOWED = (
    *("accel", "runner", "torch.nn", "torch.optim", "torchmetrics"),
    *("torchao.optim", "bitsandbytes.optim", "peft"),
)
EXTRAS = {"peft": "hf"}  # of this distribution, that bring optional packages
# Modules whose classes and functions a recipe may call. Those of our own packages are parts of a
# run: none imports by name, starts processes or changes the environment.
DEFINED_IN = (
    *("torch.nn", "torch._C._nn", "torch.optim", "torchmetrics"),
    *("torchao.optim", "bitsandbytes.optim", "peft.tuners"),
    *("accel.data", "accel.optimizer", "accel.scheduler", "accel.trackers"),
    *(
        "runner.builtin",
        "runner.callbacks",
        "runner.language",
        "runner.data.datasets",
        "runner.data.batches",
    ),
    *("runner.training.run", "runner.training.step"),
)


def trusted() -> dict[str, str]:
    """Return the user's packages, and where each was named.

    Raises:
        ConfigError: if [tool.runner] is not understood.
    """
    given = env.read(VARIABLE) or ""
    named = {name.strip(): VARIABLE for name in given.split(",") if name.strip()}
    path = paths.project_file()
    if path is not None:
        named = {**dict.fromkeys(_table_imports(path), str(path)), **named}
    return named


def _table_imports(path: Path) -> list[str]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("runner", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError.of(str(path), f"it is no TOML: {error}", "Correct it.") from error
    imports = table.get("imports", [])
    problems = Problems()
    for key in sorted(set(table) - {"imports"}):
        where = f"[tool.runner] {key} in {path}"
        problems.add(where, "its one key is imports", 'imports = ["mypkg"]')
    if not isinstance(imports, list) or not all(isinstance(name, str) for name in imports):
        problems.add(
            f"[tool.runner] imports = {imports!r} in {path}",
            "it is a list of package names",
            'Write imports = ["mypkg"].',
        )
    problems.raise_if()
    return list(imports)


def flags(needed: Iterable[str] | None = None) -> list[str]:
    """Return ``--import NAME`` for each package that pyproject.toml does not name.

    Args:
        needed: packages that a command needs; None: all that are trusted here.
    """
    path = paths.project_file()
    table = [] if path is None else _table_imports(path)
    names = [name for name in (trusted() if needed is None else needed) if name not in table]
    return [word for name in names for word in ("--import", name)]


def import_packages() -> None:
    """Import the user's packages, so that their factories are registered.

    Raises:
        ConfigError: naming every missing package, and where it is requested.
    """
    ConfigError.raise_if(missing_packages())


def missing_packages() -> list[Problem]:
    """Import the user's packages, and return the problems of those that fail."""
    problems = Problems()
    try:
        named = trusted()
    except ConfigError as error:
        return list(error.problems)
    for name, place in named.items():
        value = f"{name!r}, named by {place}"
        if not all(part.isidentifier() for part in name.split(".")):
            rule, remedy = "it is no name of a package", "Write the name that `import` takes."
            problems.add(value, rule, remedy)
            continue
        try:
            _import(name, value)
        except ConfigError as error:
            problems += error.problems
    return problems


def _import(module: str, value: str) -> types.ModuleType:
    """Import a module of the user's; a ConfigError about `value` if it is missing or exits."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        own = f"{module}.".startswith(f"{error.name}.")
        rule = "there is no such package" if own else f"importing it needs {error.name!r}"
        where = ", or run from the folder that it lies in." if own else "."
        if error.name in EXTRAS:
            where = f": pip install 'accel-runner[{EXTRAS[error.name]}]'"
        raise ConfigError.of(value, rule, f"Install {error.name!r}{where}") from error
    except SystemExit as error:  # with 0 an untrained run would look complete
        rule = f"importing {module} ended in SystemExit({error.code!r})"
        remedy = "Call sys.exit only under `if __name__ == '__main__'`."
        raise ConfigError.of(value, rule, remedy) from error


def distrust(name: str, key: str) -> Problem | None:
    """Return the problem with a dotted name at `key` of a recipe, or None if it may be imported."""
    parts = name.split(".")
    package = parts[0]
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return Problem(
            f"{key}={name}", "it is a dotted name: package.module.attribute", "Correct it."
        )
    if any(part.startswith("_") for part in parts):
        return Problem(f"{key}={name}", "it is private", "Name a public class or function.")
    if _is_in_any(name, (*ALLOWED, *trusted())):
        return None
    known = ", ".join(dict.fromkeys((*ALLOWED, *trusted())))
    rule = f"the package {package!r} is not trusted: a recipe names only code of {known}"
    remedy = (
        f"If you trust it, add to your pyproject.toml:\n    [tool.runner]\n"
        f'    imports = ["{package}"]\nor give --import {package}.'
    )
    if package in sys.stdlib_module_names:
        remedy = "Call it in a function of a package of your own, and name that."
    return Problem(f"{key}={name}", rule, remedy)


def resolve(name: str, key: str, subclass_of: type | None = None) -> Callable[..., object]:
    """Import an object that a recipe names, if both the name and the object are trusted.

    Args:
        name: dotted.
        key: of the recipe, for messages.
        subclass_of: the documented class of a node, of which it is this one or a subclass.

    Raises:
        ConfigError: if it is not trusted, or there is no such thing.
    """
    problem = distrust(name, key)
    if problem is not None:
        raise ConfigError(problem)
    value = f"{key}={name}"
    found = _locate(name, value)
    home = _defining_name(found)
    if not callable(found):
        rule = f"it is no class or function but {type(found).__name__}"
        raise ConfigError.of(value, rule, "Name a class or function of your own.")
    own: tuple[str, ...] = ()
    if subclass_of is not None:
        if not (isinstance(found, type) and issubclass(found, subclass_of)):
            rule = f"the node is {subclass_of.__name__} or a subclass of it"
            raise ConfigError.of(value, rule, "Name such a class, or leave _target_ out.")
        own = ("accel", "runner", subclass_of.__module__)
    if home is None or not _is_in_any(home, (*DEFINED_IN, *own, *trusted())):
        rule = f"it resolves to {home or type(found).__name__}, which is not trusted"
        raise ConfigError.of(value, rule, "Name a class or function of your own.")
    return found


def _defining_name(found: object) -> str | None:
    """Return the dotted name that defines an object, or a partial's function, or else its class."""
    if isinstance(found, functools.partial):
        return _defining_name(found.func)
    if not hasattr(found, "__qualname__"):
        found = type(found)
    module = getattr(found, "__module__", None)
    name = getattr(found, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    return f"{module}.{name}"


def _locate(name: str, value: str) -> object:
    """Return the object of a dotted name: of each part the attribute, else the module."""
    module, *parts = name.split(".")
    found: Any = _import(module, value)
    for part in parts:
        module = f"{module}.{part}"
        is_package = isinstance(found, types.ModuleType) and hasattr(found, "__path__")
        if not hasattr(found, part) and is_package and importlib.util.find_spec(module):
            _import(module, value)
        if not hasattr(found, part):
            close = closest(part, [other for other in dir(found) if not other.startswith("_")])
            rule = f"{getattr(found, '__name__', found)} has no {part!r}"
            remedy = did_you_mean(close) if close else "Name one that is there."
            raise ConfigError.of(value, rule, remedy)
        found = getattr(found, part)
    return found


def _is_in_any(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
