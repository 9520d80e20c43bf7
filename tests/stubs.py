"""Stubs of the engine's documented modules, from its table of names: ``python -m tests.stubs``.

Type checkers read them: at run time `accel._exports` looks names up when they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from accel._exports import EXPORTS, FILES, homes
from tests.helpers import ROOT

HEADER = "# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.\n# ruff: noqa"
# Packages, whose stubs also name the documented modules in them.
PACKAGES = {"accel": "__version__: str", "accel.utils": ""}


def imports(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield (module, attribute, name) of what a stub imports."""
    names = homes(module)
    yield from ((home, attribute, name) for name, (home, attribute) in names.items())
    if module in PACKAGES:
        files = {path.stem for path in ROOT.joinpath(*module.split(".")).glob("[a-z]*.py")}
        below = {one.rpartition(".")[2] for one in EXPORTS if one.rpartition(".")[0] == module}
        yield from ((module, name, name) for name in (files | below) - names.keys())


def stubs() -> dict[Path, str]:
    """Return the text of each stub, by its path."""
    found = {}
    for module in EXPORTS:
        if module in FILES and module not in PACKAGES:
            continue
        lines = [HEADER]
        ends = [PACKAGES.get(module, ""), "__all__: list[str]"]
        for home, attribute, name in sorted(imports(module)):
            line = f"from {home} import {attribute} as {attribute}"
            wrapped = f"from {home} import (\n    {attribute} as {attribute},\n)"
            lines.append(line if len(line) <= 100 else wrapped)
            if name != attribute:
                ends.append(f"{name} = {attribute}")
        place = ROOT.joinpath(*module.split("."))
        path = place / "__init__.pyi" if module in PACKAGES else place.with_suffix(".pyi")
        found[path] = "\n".join([*lines, "", *filter(None, ends), ""])
    return found


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text, encoding="utf-8")
