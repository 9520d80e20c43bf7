"""Every test module names the promises that it holds, and a promise of that name exists (C2)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CODE = re.compile(r"\b[RCSLEX]\d+\b")
PROMISES = set(re.findall(r"^- \*\*([A-Z]\d+)\b", (TESTS / "PROMISES.md").read_text(), re.M))


def promises_of(module: Path) -> set[str]:
    """Return the codes in a module's docstring."""
    return set(CODE.findall(ast.get_docstring(ast.parse(module.read_text())) or ""))


def test_every_module_names_the_promises_that_it_holds() -> None:
    found = {str(p.relative_to(TESTS)): promises_of(p) for p in sorted(TESTS.rglob("test_*.py"))}
    assert len(PROMISES) == 27
    assert [name for name, codes in found.items() if not codes] == []
    assert {name: codes - PROMISES for name, codes in found.items() if codes - PROMISES} == {}
