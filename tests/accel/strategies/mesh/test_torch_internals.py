"""Private names of torch are in one file (E5)."""

from __future__ import annotations

import ast
from pathlib import Path

from accel.strategies.mesh import torch_internals

BY_NAME = ("getattr", "setattr", "hasattr")


def private_names(tree: ast.AST) -> list[str]:
    """Return the names of others that begin with an underscore and that a file uses."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "super()"):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            owner, *rest = [ast.unparse(argument) for argument in node.args]
            names = [text.strip("'") for text in rest[:1] if owner != "self"]
        found += [name for name in names if name.startswith("_") and not name.endswith("__")]
    return found


# Names that models of transformers define: the classes of their blocks, their tensor-parallel plan.
MODELS_OWN = {"_no_split_modules", "_tp_plan"}
ROOM = Path(torch_internals.__file__).parent


def test_other_files_of_the_room_use_no_private_names() -> None:
    wrong = {}
    for path in ROOM.glob("*.py"):
        found = set(private_names(ast.parse(path.read_text()))) - MODELS_OWN
        if found and path.name != "torch_internals.py":
            wrong[path.name] = found
    assert wrong == {}
