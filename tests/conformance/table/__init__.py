"""The conformance table, one file a part of the documentation."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.conformance.rows import Entry

PARTS = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def entries(part: str = "") -> list[Entry]:
    """Return the documented names of one part, or of all."""
    chosen = [part] if part else PARTS
    modules = [importlib.import_module(f"{__name__}.{name}") for name in chosen]
    return [entry for module in modules for entry in module.ENTRIES]
