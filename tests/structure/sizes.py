"""Sizes of a checkout: code lines, syntax nodes and files of each part, against their budgets."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.structure.source import Source, read

# Folders of each part. `hydra_plugins` is the runner's; Hydra demands the name at the top level.
PARTS = {
    "accel": ("accel",),
    "runner": ("runner", "hydra_plugins"),
    "tests": ("tests",),
    "examples": ("examples",),
}
# Code lines that a part may have, and files of `accel` and `runner` together.
BUDGETS = {"accel": 26_200, "runner": 19_000, "tests": 51_000}
MAX_FILES = 325
# Helpers are what no test runner collects.
HELPERS = "    of it helpers"


@dataclass(frozen=True)
class Size:
    """How much code a part of the checkout has.

    Attributes:
        lines: code lines: neither blank nor comments nor docstrings.
        nodes: nodes of the syntax trees, docstrings left out.
        files: Python files.
    """

    lines: int
    nodes: int
    files: int


def size(sources: Iterable[Source]) -> Size:
    """Return the size of some files."""
    sources = list(sources)
    return Size(
        sum(len(one.code_lines) for one in sources),
        sum(num_nodes(one) for one in sources),
        len(sources),
    )


def num_nodes(source: Source) -> int:
    """Return the number of nodes of a file's syntax tree, docstrings left out."""
    return sum(1 for _ in ast.walk(source.tree)) - 2 * sum(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for node in ast.walk(source.tree)
    )


def sizes(root: Path) -> dict[str, Size]:
    """Return the size of each part of the checkout at `root`, and of `conf/` (lines, files)."""
    found = {}
    for part, folders in PARTS.items():
        sources = read(root, *folders)
        found[part] = size(sources)
        if part == "tests":
            found[HELPERS] = size(one for one in sources if "/test_" not in one.place)
    texts = [path.read_text(encoding="utf-8") for path in (root / "conf").rglob("*.yaml")]
    lines = [line for text in texts for line in text.splitlines()]
    found["conf"] = Size(
        sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines),
        0,
        len(texts),
    )
    return found


def over_budget(found: Mapping[str, Size]) -> list[str]:
    """Return a sentence for each budget that is exceeded."""
    said = [
        f"{part} has {found[part].lines} code lines; its budget is {most}"
        for part, most in BUDGETS.items()
        if found[part].lines > most
    ]
    files = found["accel"].files + found["runner"].files
    if files > MAX_FILES:
        said.append(f"accel and runner have {files} files; their budget is {MAX_FILES}")
    return said


def table(found: Mapping[str, Size]) -> str:
    """Return `found` as aligned text, with the budgets."""
    rows = [("", "code lines", "budget", "AST nodes", "files")]
    for part, one in found.items():
        most = BUDGETS.get(part)
        rows.append((part, str(one.lines), str(most or ""), str(one.nodes), str(one.files)))
    both = found["accel"].files + found["runner"].files
    rows.append(("accel and runner", "", "", "", f"{both} (budget {MAX_FILES})"))
    return "\n".join(f"{a:<18} {b:>10} {c:>7} {d:>10}  {e}".rstrip() for a, b, c, d, e in rows)
