"""The layers hold, read from the source: nothing is imported."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import python

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 520

# First match wins; a module may import from its own layer and from lower ones.
LAYERS: list[tuple[str, int]] = [
    ("accel.__init__", 9),
    ("accel.utils", 9),
    ("accel.data_loader", 9),
    ("accel.tracking", 9),
    ("accel.checkpointing", 9),
    ("accel.errors", 0),
    ("accel.enums", 0),
    ("accel.env", 0),
    ("accel.imports", 0),
    ("accel.tree", 0),
    ("accel.objects", 0),
    ("accel.config", 1),
    ("accel.device", 2),
    ("accel.arguments", 2),
    ("accel.plan", 2),
    ("accel.engines", 2),
    ("accel.comm", 3),
    ("accel.state", 4),
    ("accel.checkpoint.session", 8),
    ("accel.checkpoint", 5),
    ("accel.ops", 5),
    ("accel.rng", 5),
    ("accel.logging", 5),
    ("accel.memory", 5),
    ("accel.wrapping", 5),
    ("accel.optimizer", 5),
    ("accel.scheduler", 5),
    ("accel.precision", 5),
    ("accel.data", 5),
    ("accel.strategies", 6),
    ("accel.trackers", 7),
    ("accel", 8),
]
FACADES = {"accel", "accel.utils", "accel.data_loader", "accel.tracking", "accel.checkpointing"}
BACKEND_ROOMS = {
    "deepspeed": ("accel/strategies/deepspeed", "accel/config/deepspeed.py", "accel/imports.py"),
    "transformer_engine": ("accel/precision", "accel/imports.py"),
    "torch_xla": ("accel/strategies/xla.py", "accel/comm/xla.py", "accel/imports.py"),
}


@cache
def sources(package: str) -> list[tuple[str, Path, ast.Module]]:
    """Return (module name, path, syntax tree) of every file of `package`."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts), path, ast.parse(path.read_text())))
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield (module, names) of each import, leaving out those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", [alias.name for alias in node.names]
        else:
            yield from imported(node)


def layer(module: str) -> int:
    for prefix, number in LAYERS:
        if module == prefix or module.startswith(prefix + "."):
            return number
    raise KeyError(module)


def canonical(module: str, names: list[str]) -> list[str]:
    """Return the modules that an import reaches (``from accel import ops`` reaches accel.ops)."""
    if module in ("accel", "accel.checkpoint", "accel.comm", "accel.config", "accel.data"):
        reached = [
            f"{module}.{name}"
            for name in names
            if (ROOT / Path(*module.split(".")) / f"{name}.py").exists()
            or (ROOT / Path(*module.split(".")) / name).is_dir()
        ]
        return reached if len(reached) == len(names) and names else [module, *reached]
    return [module]


def test_imports_never_point_to_a_higher_layer() -> None:
    wrong = []
    for module, path, tree in sources("accel"):
        here = layer(module)
        for target, names in imported(tree):
            if not target.startswith("accel"):
                continue
            for reached in canonical(target, names):
                name = "accel.__init__" if reached == "accel" else reached
                if layer(name) > here:
                    wrong.append(f"{path.relative_to(ROOT)} (L{here}) imports {reached}")
    assert wrong == []


def test_working_code_never_imports_a_facade() -> None:
    wrong = []
    for module, path, tree in sources("accel"):
        if layer(module) == 9:
            continue
        for target, names in imported(tree):
            for reached in canonical(target, names) if target.startswith("accel") else []:
                if reached in FACADES:
                    wrong.append(f"{path.relative_to(ROOT)} imports {reached}")
    assert wrong == []


def test_the_engine_knows_nothing_of_the_runner() -> None:
    for _, path, tree in sources("accel"):
        targets = [target for target, _ in imported(tree)]
        assert not [t for t in targets if t.split(".")[0] in ("runner", "hydra", "omegaconf")], path


@pytest.mark.parametrize("package", ["accel", "runner"])
def test_only_env_touches_the_environment(package: str) -> None:
    wrong = []
    for _, path, tree in sources(package):
        if path == ROOT / "accel" / "env.py":
            continue
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.ImportFrom)) else ""
            if text in ("os.environ", "os.getenv", "os.putenv") or "import environ" in text:
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    assert wrong == []


@pytest.mark.parametrize("package", ["accel", "runner", "tests"])
def test_files_are_one_thing_each(package: str) -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for _, path, _ in sources(package)
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_optional_engines_are_imported_in_their_rooms_only() -> None:
    wrong = []
    for _, path, tree in sources("accel"):
        place = str(path.relative_to(ROOT))
        for target, _ in imported(tree):
            rooms = BACKEND_ROOMS.get(target.split(".")[0])
            if rooms is not None and not place.startswith(rooms):
                wrong.append(f"{place} imports {target}")
    assert wrong == []


def test_no_exception_is_swallowed() -> None:
    """No bare `except`, and no handler whose body is only `pass` or `continue`."""
    wrong = []
    for package in ("accel", "runner"):
        for _, path, tree in sources(package):
            for node in ast.walk(tree):
                if isinstance(node, ast.ExceptHandler):
                    silent = all(isinstance(s, (ast.Pass, ast.Continue)) for s in node.body)
                    if node.type is None or (silent and ast.unparse(node.type) == "Exception"):
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


IMPORT_PROBE = """
import sys
{statement}
heavy = ["torch", "deepspeed", "transformers", "wandb", "mlflow", "comet_ml", "torchdata"]
print(",".join(name for name in heavy if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import accel", ""),
        ("import accel.config.handlers, accel.config.training", ""),
        ("import runner, runner.schema, runner.registry, runner.batch_plan, runner.cli", ""),
        ("from accel import Accelerator", "torch"),
    ],
)
def test_what_an_import_pulls_in(statement: str, allowed: str) -> None:
    command = python("-c", IMPORT_PROBE.format(statement=statement))
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == allowed
