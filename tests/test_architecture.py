"""E6, X1: the layers hold, read from the source: nothing is imported."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from accel._exports import EXPORTS
from tests.helpers import python

ROOT = Path(__file__).resolve().parent.parent

# First match wins; a module may import from its own layer and from lower ones.
LAYERS: list[tuple[str, int]] = [
    ("accel.__init__", 9),
    ("accel._exports", 9),
    ("accel.utils", 9),
    ("accel.commands", 9),
    ("accel.machine", 0),
    ("accel.config", 1),
    ("accel.strategies.spec", 2),
    ("accel.strategies.table", 2),
    ("accel.plan", 2),
    ("accel.comm.processes", 4),
    ("accel.comm.ops", 5),
    ("accel.comm.rng", 5),
    ("accel.comm", 3),
    ("accel.state", 4),
    ("accel.logging", 5),
    ("accel.optimizer", 5),
    ("accel.scheduler", 5),
    ("accel.checkpoint.session", 8),
    ("accel.checkpoint.save", 8),
    ("accel.checkpoint.load", 8),
    ("accel.checkpoint.contents", 8),
    ("accel.checkpoint", 5),
    ("accel.precision", 5),
    ("accel.data", 5),
    ("accel.weights", 6),
    ("accel.strategies", 6),
    ("accel.trackers", 7),
    ("accel.run", 8),
    ("accel", 8),
]
FACADES = set(EXPORTS)
STRATEGIES = "accel/strategies/"
# Where torch's own sharding is known.
SHARDS = ("accel/strategies/mesh/",)
# Modules of one backend, and the only places that import them; `table.py` names strategies as text.
BACKEND_ROOMS: dict[str, tuple[str, ...]] = {
    "deepspeed": (
        *("accel/strategies/deepspeed/", "accel/config/deepspeed.py", "accel/machine/imports.py"),
    ),
    "transformer_engine": ("accel/precision/", "accel/machine/imports.py"),
    "torch_xla": ("accel/strategies/xla/", "accel/machine/imports.py"),
    "torch.distributed.fsdp": SHARDS,
    "torch.distributed.tensor": SHARDS,
    "torch.distributed._composable": SHARDS,
    "accel.strategies.mesh": SHARDS,
    "accel.strategies.deepspeed": ("accel/strategies/deepspeed/",),
    "accel.strategies.xla": ("accel/strategies/xla/",),
    "accel.strategies.ddp": (),
}
BACKEND_NAMES = {"single", "ddp", "fsdp", "tp", "deepspeed", "megatron", "xla"}


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
    """Return the modules that an import reaches (`from a import b` reaches a.b)."""
    if (ROOT / Path(*module.split("."))).is_dir():
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


# Modules of the documented API that have a file at the top of `accel`.
TOP = {
    *("accelerator", "inference", "launchers", "local_sgd", "logging", "optimizer"),
    *("scheduler", "state"),
}


def test_a_file_at_the_top_of_the_engine_is_a_documented_module() -> None:
    found = {path.stem for path in (ROOT / "accel").glob("*.py")}
    assert found == {"__init__", "_exports", *TOP}


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


def reads_environment(node: ast.AST) -> bool:
    names = ("environ", "getenv", "putenv")
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return isinstance(node, ast.Attribute) and ast.unparse(node) in [f"os.{name}" for name in names]


@pytest.mark.parametrize("package", ["accel", "runner"])
def test_only_env_touches_the_environment(package: str) -> None:
    wrong = []
    for _, path, tree in sources(package):
        if path == ROOT / "accel" / "machine" / "env.py":
            continue
        for node in ast.walk(tree):
            if reads_environment(node):
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    assert wrong == []


# Rooms of the runner, lowest first, and the rooms that each may import. All may import `accel` and
# the leaves.
LEAVES = {"exit_codes"}
ROOMS: dict[str, tuple[str, ...]] = {
    "recipe": (),
    "runs": ("recipe",),
    "data": ("recipe",),
    "training": ("recipe", "runs", "data"),
    "callbacks": ("recipe", "data", "training"),
    "builtin": ("recipe", "data", "training"),
    "language": ("recipe", "runs", "data", "training"),
    "reporting": ("recipe", "runs", "training"),
    "inference": ("recipe", "runs", "data", "training", "language", "reporting"),
    "launch": ("recipe", "runs", "data", "training"),
    "sweep": ("recipe", "runs", "training", "launch", "reporting"),
    "cli": (
        *("recipe", "runs", "data", "training", "language", "inference", "launch", "sweep"),
        "reporting",
    ),
}


def rooms_reached(tree: ast.AST) -> set[str]:
    """Return the runner's rooms that a file imports, also lazily or for type checkers only."""
    reached = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "runner":
            reached.update((node.module or "").split(".")[1:2] or [a.name for a in node.names])
        elif isinstance(node, ast.Import):
            parts = [alias.name.split(".") for alias in node.names]
            reached.update(part[1] for part in parts if part[0] == "runner" and len(part) > 1)
    return reached


def test_a_room_of_the_runner_imports_the_rooms_below_it_alone() -> None:
    order = list(ROOMS)
    assert all(set(ROOMS[name]) <= set(order[:at]) for at, name in enumerate(order))
    wrong = []
    for module, path, tree in sources("runner"):
        room = module.split(".")[1]
        if room in ROOMS:
            strange = rooms_reached(tree) - {room, *ROOMS[room], *LEAVES}
            wrong += [f"{path.relative_to(ROOT)} imports runner.{name}" for name in strange]
    assert wrong == []


def test_every_folder_of_the_runner_is_a_room() -> None:
    folders = {path.parent.name for path in (ROOT / "runner").glob("*/*.py")}
    assert folders == set(ROOMS)
    top = {path.stem for path in (ROOT / "runner").glob("*.py")}
    assert top == {"__init__", "__main__", *LEAVES}


def imports_outside_rooms(place: str, tree: ast.AST) -> list[str]:
    """Return the modules of one backend that the file at `place` imports and may not."""
    return [
        backend
        for target, names in imported(tree)
        for backend, rooms in BACKEND_ROOMS.items()
        if any(f"{one}.".startswith(f"{backend}.") for one in reached_by(target, names))
        and not place.startswith(rooms)
    ]


def reached_by(target: str, names: list[str]) -> list[str]:
    """Return what ``from target import names`` may import: each name can be a module."""
    return [target, *(f"{target}.{name}" for name in names)]


@pytest.mark.parametrize("package", ["accel", "runner"])
def test_backends_are_imported_in_their_rooms_only(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for _, path, tree in sources(package)
        if (found := imports_outside_rooms(str(path.relative_to(ROOT)), tree))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("snippet", "backend"),
    [
        ("from torch.distributed import fsdp", "torch.distributed.fsdp"),
        ("def late():\n    import deepspeed", "deepspeed"),
        ("from accel.strategies import deepspeed", "accel.strategies.deepspeed"),
    ],
)
def test_an_import_outside_its_room_is_found(snippet: str, backend: str) -> None:
    assert imports_outside_rooms("accel/run/accumulation.py", ast.parse(snippet)) == [backend]


def end(node: ast.AST | None) -> str:
    """Return the last name of a dotted one: "c" of a.b.c, "" of anything else."""
    return getattr(node, "attr", getattr(node, "id", ""))


def reports_backend(node: ast.AST) -> bool:
    """Return whether `node` is ….distributed_type, ….spec.name or ….plan.strategy."""
    if not isinstance(node, ast.Attribute):
        return False
    pair = end(node.value), node.attr
    return node.attr == "distributed_type" or pair in {("spec", "name"), ("plan", "strategy")}


def asked(node: ast.AST) -> list[ast.AST]:
    """Return what `node` compares, matches, looks up or takes apart."""
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        return [inner for part in parts for inner in ast.walk(part)]
    if isinstance(node, ast.Match):
        return list(ast.walk(node.subject))
    if isinstance(node, ast.Subscript):
        return [node.value, node.slice]
    return [node.value] if isinstance(node, ast.Attribute) else []


def names_a_type(node: ast.AST) -> bool:
    """Return whether `node` is DistributedType.X, DistributedType["X"] or DistributedType("X")."""
    inner = node.func if isinstance(node, ast.Call) else getattr(node, "value", None)
    is_use = isinstance(node, ast.Attribute | ast.Subscript | ast.Call)
    return is_use and end(inner) == "DistributedType"


def asks_for_its_name(node: ast.AST) -> bool:
    """Return whether `node` decides by what a backend reports itself to be."""
    return any(map(reports_backend, asked(node)))


def compares_with_a_name(node: ast.AST) -> bool:
    """Return whether `node` compares something with the name of a backend."""
    return isinstance(node, ast.Compare) and any(
        isinstance(one, ast.Constant) and one.value in BACKEND_NAMES for one in asked(node)
    )


# What tells one backend from the others, and who may ask for it, beside the names that
# `tests/structure/naming.py` finds. No other code knows which is on:
# what it needs to know is a field of `StrategySpec` or a method of `Strategy`.
BACKEND_TESTS: dict[Callable[[ast.AST], bool], tuple[str, ...]] = {
    names_a_type: ("accel/machine/enums.py", "accel/plan/plan.py", STRATEGIES),
    asks_for_its_name: (),
    compares_with_a_name: (
        STRATEGIES,
        "accel/config/tensor_parallel.py",  # "tp" is the name of an axis of a device mesh there
    ),
}


def backend_tests(place: str, tree: ast.AST) -> list[str]:
    """Return what the file at `place` asks of backends and may not."""
    return [
        f"{place}:{getattr(node, 'lineno', 0)} {rule.__name__}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        for rule, rooms in BACKEND_TESTS.items()
        if rule(node) and not place.startswith(rooms)
    ]


@pytest.mark.parametrize("package", ["accel", "runner"])
def test_no_code_outside_its_rooms_asks_which_backend_is_on(package: str) -> None:
    wrong = []
    for _, path, tree in sources(package):
        wrong += backend_tests(str(path.relative_to(ROOT)), tree)
    assert wrong == []


@pytest.mark.parametrize(
    ("snippet", "rule"),
    [
        ("kind in enums.DistributedType['FSDP']", names_a_type),
        ("accelerator.distributed_type == kind", asks_for_its_name),
        ("handlers[self.plan.strategy]", asks_for_its_name),
        ("name in ('ddp', 'single')", compares_with_a_name),
    ],
)
def test_a_backend_test_outside_its_rooms_is_found(
    snippet: str, rule: Callable[[ast.AST], bool]
) -> None:
    found = backend_tests("accel/run/accumulation.py", ast.parse(snippet))
    assert [one.split()[1] for one in found] == [f"{rule.__name__}:"]


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
heavy = ["torch", "deepspeed", "transformers", "wandb", "mlflow", "tensorboard", "torchdata"]
print(",".join(name for name in heavy if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import accel", ""),
        ("import accel.config.handlers, accel.config.training", ""),
        (
            "import runner, runner.recipe.schema, runner.recipe.factory"
            ", runner.recipe.batch_plan, runner.cli",
            "",
        ),
        ("from accel import Accelerator", "torch"),
    ],
)
def test_what_an_import_pulls_in(statement: str, allowed: str) -> None:
    command = python("-c", IMPORT_PROBE.format(statement=statement))
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == allowed
